"""Reports: what a run or a benchmark came to, as JSON, Markdown, plots, and one HTML page.

Imports ``hf_pyao.errors`` and, when a page is drawn, matplotlib; neither torch nor transformers.
"""

from hf_pyao.report.bench_report import BenchReport as BenchReport
from hf_pyao.report.bench_report import BenchRow as BenchRow
from hf_pyao.report.documents import read_document as read_document
from hf_pyao.report.run_report import RunReport as RunReport
from hf_pyao.report.run_report import check_report_path as check_report_path
from hf_pyao.report.run_report import write_run_report as write_run_report
from hf_pyao.report.schema import ReportError as ReportError
