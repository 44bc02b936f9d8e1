"""Let torchtune 0.6.1 run under torchao 0.16 and later; imported before torchtune, wherever that is
imported.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from tfidf_tune._quiet import hidden_log_messages

# Under torchrun, each process of a recipe would print them, before the recipe can hide messages by
# itself.
with hidden_log_messages():
    import torchao.dtypes
    import torchao.quantization


def _is_gone(*_: Any, **__: Any) -> None:
    raise NotImplementedError("this quantizer of torchtune needs torchao < 0.16")


# Names of quantizers that torchtune imports and this package does not use.
for _module, _name in (
    (torchao.quantization, "int4_weight_only"),
    (torchao.quantization, "int8_dynamic_activation_int4_weight"),
    (torchao.dtypes, "TensorCoreTiledLayout"),
):
    if not hasattr(_module, _name):
        setattr(_module, _name, _is_gone)
# NF4 has another place from 0.18 on.
_NF4 = "torchao.dtypes.nf4tensor"
if _NF4 not in sys.modules and find_spec(_NF4) is None:
    _nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    sys.modules[_NF4] = torchao.dtypes.nf4tensor = _nf4
