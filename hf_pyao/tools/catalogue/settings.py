"""Entries of settings, options, arguments and files."""

from __future__ import annotations

from hf_pyao.tools.catalogue.entry import Chapter, Entry

CHAPTER = Chapter(
    "Settings, options and files",
    (
        Entry(
            "setting-value",
            "A setting or a command's option has a value of the wrong type, or out of its range.",
            "Give what the message expects. Flags, `PYAO_...` variables, the plugin's fields and "
            "the JSON file take the same values. In YAML, write `off` in quotes.",
        ),
        Entry(
            "bytes-without-unit",
            "A size is so low a number that it was meant in another unit. Numbers are bytes.",
            "Give the size with its unit, as a text: `window='256MiB'`.",
        ),
        Entry(
            "unknown-name",
            "A setting, policy, codec, card, method or option has a name that hf_pyao does not "
            "have. Often it is misspelt.",
            "Take the name that the message suggests, or one from its list.",
        ),
        Entry(
            "setting-removed",
            "The setting, or this value of it, existed in an earlier version.",
            "The message says what to do instead. Remove what is gone from flags, environment and "
            "files.",
        ),
        Entry(
            "setting-missing",
            "A setting or option needs another one that was not given, such as policy 'budget' "
            "its budget.",
            "Give the one that the message names, or choose a policy that does not need it.",
        ),
        Entry(
            "setting-without-effect",
            "A setting or option was given that does nothing beside the others, such as a budget "
            "with policy 'all'. It is refused, so that nobody believes in it.",
            "Drop it, or change the setting that the message names.",
        ),
        Entry(
            "settings-contradict",
            "Two settings or options exclude each other, or give two values for the same thing.",
            "Keep one of the two.",
        ),
        Entry(
            "setting-given-twice",
            "A flag and the configuration file give different values for one setting. The flag is "
            "used.",
            "Nothing needs to be done if the flag is what you want. Otherwise remove one of them.",
        ),
        Entry(
            "wrong-argument",
            "A function or class of the Python API was called with a value of the wrong type or "
            "shape.",
            "Pass what the message expects; the docstring of the function has types and shapes.",
        ),
        Entry(
            "file-unreadable",
            "A file does not exist, or this process may not read it.",
            "Check the path and its permissions. With several nodes, the file must be there on "
            "each of them.",
        ),
        Entry(
            "file-damaged",
            "A file is no valid JSON, was cut off, or holds values that cannot be right.",
            "Make it anew with the command that wrote it. If you edited it, undo the edit.",
        ),
        Entry(
            "file-other-version",
            "Another version of hf_pyao wrote this file, with another schema.",
            "Make it anew with this version, or read it with the version that wrote it.",
        ),
        Entry(
            "file-kind",
            "The file is a document of hf_pyao, but not of the kind that is needed here.",
            "Give the kind that the message names: profiles come from `pyao profile`, plans from "
            "`pyao plan` or a run, reports from a run with `report`.",
        ),
        Entry(
            "file-unwritable",
            "A report, profile or plan cannot be written: the folder is missing, may not be "
            "written to, or the disk is full. Training goes on.",
            "Give a path in a folder that this process may write to, with free space.",
        ),
        Entry(
            "missing-package",
            "An optional package is not installed, or cannot be imported.",
            "Install it as the message says. If it is installed, its versions may not fit each "
            "other: `pyao doctor` lists them.",
        ),
        Entry(
            "needs-gpu",
            "A GPU was asked for, and torch finds none.",
            "Run `nvidia-smi` and `python -c 'import torch; print(torch.cuda.is_available())'`. "
            "A CPU build of torch finds no GPU: install one for CUDA.",
        ),
        Entry(
            "internal",
            "Something that hf_pyao relies on does not hold. This is a defect of hf_pyao.",
            "Please report it with the traceback and the output of `pyao doctor --json`.",
        ),
    ),
)
