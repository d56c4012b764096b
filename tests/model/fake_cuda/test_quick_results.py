"""Operations that are answered without torch's detour say what torch says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_pyao.model.fake_cuda.quick_results import quick_result

aten: Any = torch.ops.aten


def _tensors(random_numbers: random.Random) -> Iterator[Tensor]:
    """Yield tensors of all sorts of layouts and dtypes, of three dimensions and of four."""
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
    for dtype in dtypes:
        sizes = [random_numbers.randint(1, 5) for _ in range(3)]
        whole = torch.empty(*sizes, dtype=dtype)
        yield whole
        yield whole.transpose(0, 2)
        yield whole[:, ::2]
        yield whole[:1].expand(4, -1, -1)
        yield torch.empty(0, 3, 2, dtype=dtype)
        yield torch.empty(1, 1, 1, dtype=dtype)
        sizes = [random_numbers.randint(1, 4) for _ in range(4)]
        heads = torch.empty(*sizes, dtype=dtype).transpose(1, 2)
        yield heads
        yield heads[..., 1:]
        yield torch.empty(*sizes, dtype=dtype).to(memory_format=torch.channels_last)
        yield torch.empty(*sizes, dtype=dtype).permute(3, 1, 0, 2)


CALLS: dict[str, Callable[[Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "detach": lambda x: (aten.detach.default, (x,), {}),
    "expand": lambda x: (aten.expand.default, (x, [2, *x.shape]), {}),
    "permute": lambda x: (aten.permute.default, (x, [2, 0, 1]), {}),
    "select": lambda x: (aten.select.int, (x, 2, 0), {}),
    "slice": lambda x: (aten.slice.Tensor, (x, 1, 1, 9, 2), {}),
    "squeeze": lambda x: (aten.squeeze.dim, (x, 0), {}),
    "t": lambda x: (aten.t.default, (x[0],), {}),
    "transpose": lambda x: (aten.transpose.int, (x, 0, -1), {}),
    "unsqueeze": lambda x: (aten.unsqueeze.default, (x, 1), {}),
    "view": lambda x: (aten.view.default, (x, [-1, *x.shape[2:]]), {}),
    "view of a dtype": lambda x: (aten.view.dtype, (x, torch.uint8), {}),
    "copy to": lambda x: (aten._to_copy.default, (x,), {"dtype": torch.float32}),
    "copy": lambda x: (aten.copy_.default, (x, torch.empty(x.shape, dtype=torch.float32)), {}),
    "add in place": lambda x: (aten.add_.Tensor, (x, x), {"alpha": 2}),
    "clone": lambda x: (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
    "bmm": lambda x: (aten.bmm.default, (x, x.transpose(1, 2)), {}),
    "alias": lambda x: (aten.alias.default, (x,), {}),
    "subtract in place": lambda x: (aten.sub_.Tensor, (x, x[:1]), {}),
    "fill": lambda x: (aten.fill_.Scalar, (x, 2), {}),
    "zero": lambda x: (aten.zero_.default, (x,), {}),
    "pad": lambda x: (aten.constant_pad_nd.default, (x, [1, 2], 3.0), {}),
    "copy to its device": lambda x: (
        aten._to_copy.default,
        (x,),
        {"dtype": torch.float32, "layout": torch.strided, "device": torch.device("cpu")},
    ),
    "flash attention": lambda x: (
        aten._scaled_dot_product_flash_attention.default,
        (x, x[:, :1], x[:, :1], 0.0, True),
        {"scale": 0.5},
    ),
    "embedding back": lambda x: (
        aten.embedding_dense_backward.default,
        (x, torch.zeros(x.shape[:-1], dtype=torch.int64), 9, 2, False),
        {},
    ),
}
"""Each with a tensor of any layout and dtype; many are refused by torch for some."""


def _outcome(call: Callable[[], Any]) -> Any:
    """Return what is told of a result: layouts, dtypes, whose memory; or that it fails."""
    try:
        found = call()
    except Exception as error:  # torch's words for what it refuses differ
        return f"refused: {type(error).__name__}"
    if found is None:
        return None
    results = found if isinstance(found, tuple | list) else (found,)
    return [_told(each) for each in results]


def _told(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    assert type(tensor) is FakeTensor
    # The stride of a dimension of one element says nothing.
    strides = [
        stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ]
    return (
        tensor.shape,
        strides if tensor.numel() else [],
        tensor.dtype,
        tensor.storage_offset(),
        tensor.device,
        tensor.untyped_storage().nbytes(),
        tensor.constant,
    )


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("name", CALLS)
def test_a_result_is_torch_s(name: str) -> None:
    num_answered = 0
    with FakeTensorMode(), torch.no_grad():
        for tensor in _tensors(random.Random(name)):
            try:
                func, args, kwargs = CALLS[name](tensor)
                others = CALLS[name](tensor)
            except Exception:  # the arguments cannot be made of this one
                continue
            quick = _outcome(lambda: quick_result(func, args, kwargs))
            if quick is None:
                continue
            func, args, kwargs = others
            usual = _outcome(lambda: func(*args, **kwargs))
            if isinstance(quick, str):
                assert isinstance(usual, str), (tensor.shape, tensor.stride(), quick, usual)
                continue
            assert quick == usual, (tensor.shape, tensor.stride(), tensor.dtype)
            num_answered += 1
    assert num_answered >= 1


def test_a_view_shares_its_memory_and_a_write_returns_what_was_written() -> None:
    with FakeTensorMode(), torch.no_grad():
        source = torch.empty(3, 4)
        view = quick_result(aten.slice.Tensor, (source, 0, 1, 2), {})
        assert view.untyped_storage()._cdata == source.untyped_storage()._cdata
        assert quick_result(aten.copy_.default, (source, torch.empty(4)), {}) is source
        new = quick_result(aten.clone.default, (source,), {})
        assert new.untyped_storage()._cdata != source.untyped_storage()._cdata


def test_wrong_shapes_are_refused_as_ever() -> None:
    with FakeTensorMode(), torch.no_grad(), pytest.raises(RuntimeError):
        quick_result(aten.view.default, (torch.empty(5, 3), [4, 4]), {})


def test_what_is_not_plain_goes_the_usual_way() -> None:
    real = torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        constant = torch.tensor(2.0)  # its value is known
        fake = torch.empty(3)
        assert constant.constant is not None
        for args in ((constant, fake), (fake, constant), (fake, real), (real, fake)):
            assert quick_result(aten.add_.Tensor, args, {}) is None
        other = FakeTensorMode().from_tensor(real)
        assert quick_result(aten.add_.Tensor, (fake, other), {}) is None
        cuda = FakeTensor(mode, torch.empty(3, device="meta"), torch.device("cuda:0"))
        assert quick_result(aten.add_.Tensor, (fake, cuda), {}) is None
        moved = quick_result(aten._to_copy.default, (fake,), {"device": torch.device("cuda:0")})
        assert moved is None
        assert quick_result(aten.erf.default, (fake,), {}) is None
