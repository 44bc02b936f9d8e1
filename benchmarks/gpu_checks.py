"""Rung 0 of ``gpu.py``: weights, losses, graphs and compiled weightings on the device against the CPU."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)

import torch
from fused_head import IGNORED, WAYS, Case, Inputs, forward_and_backward, is_installed, make_inputs  # type: ignore[import-not-found]
from gpu_steps import Check, NotPossible, Outcome, Setting  # type: ignore[import-not-found]
from torch import Tensor
from weights import label_batches  # type: ignore[import-not-found]

from tfidf_tune.loss import HeadInput
from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    PowerLawWeighting,
    Predictions,
    ProductWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenBatch,
    TokenDropWeighting,
    TokenWeighting,
)

_EPS = torch.finfo(torch.float32).eps
# The tests allow 24 eps between weights and their reference; here two such computations are compared.
_WEIGHT_RTOL = 48 * _EPS
# Of the gradients, in the 2-norm and eps of the dtype, as in the tests. On a CPU it is at most 2 (fp32).
_GRADIENT_EPS = 8
_WEIGHTINGS: dict[str, Callable[[], TokenWeighting]] = {
    "TF-IDF": TFIDFWeighting,
    "TF-IDF log, capped": partial(TFIDFWeighting, tf="log", max_weight=2.0),
    "TF-IDF binary": partial(TFIDFWeighting, tf="binary"),
    "Goldfish": GoldfishWeighting,
    "Goldfish static": partial(GoldfishWeighting, strategy="static"),
    "token dropping": TokenDropWeighting,
    "MiLe": MiLeWeighting,
    "focal": FocalWeighting,
    "power law": PowerLawWeighting,
    "repetition": RepetitionWeighting,
    "repetition, short contexts": partial(
        RepetitionWeighting, h=2, k=1, span=5, min_length=1, sample=1, num_buckets=2**16
    ),
    "Goldfish x TF-IDF": lambda: ProductWeighting(GoldfishWeighting(), TFIDFWeighting()),
}
_CAPTURED = ("TF-IDF", "TF-IDF log, capped", "Goldfish", "power law", "repetition", "repetition, short contexts")
_COMPILED = (
    "TF-IDF", "Goldfish", "Goldfish static", "token dropping", "MiLe", "focal", "power law", "repetition",
    "repetition, short contexts",
)  # fmt: skip


def batches(setting: Setting, *, same_shape: bool = False) -> Iterator[TokenBatch]:
    """Draw mini-batches on the CPU: full ones, with documents, shorter, with nothing in it, all with ignored labels.

    Only the first row has no ignored labels. It is the same in each, so that repetition weights meet a copy.
    """
    shape, vocab_size = ((3, 60), 50) if setting.tiny else ((8, 256), 32_000)
    generator = torch.Generator().manual_seed(0)
    passage = torch.randint(vocab_size, shape[1:], generator=generator)
    for number, labels in zip(range(24), label_batches(shape, vocab_size, "cpu"), strict=False):
        labels[torch.rand(shape, generator=generator) < 0.1] = IGNORED
        labels[0] = passage
        if number == 3:
            labels.fill_(IGNORED)
        if number == 5 and not same_shape:
            labels = labels[1:, : shape[1] // 2].contiguous()
        parts = [torch.rand(labels.shape, generator=generator) for _ in range(2)]
        documents = (torch.arange(labels.shape[1]) // 25).expand(labels.shape).contiguous() if number % 2 else None
        yield TokenBatch(
            labels, document_ids=documents, vocab_size=vocab_size, predictions=Predictions(-parts[0], parts[1])
        )


def moved(batch: TokenBatch, device: str) -> TokenBatch:
    """A mini-batch on the device."""
    documents = None if batch.document_ids is None else batch.document_ids.to(device)
    predictions = batch.predictions and Predictions(*(part.to(device) for part in batch.predictions))
    return batch._replace(labels=batch.labels.to(device), document_ids=documents, predictions=predictions)


def weights(setting: Setting, _: str) -> Outcome:
    """All weightings over a stream of mini-batches, the last third in evaluation: weights and state."""
    checks = []
    for name, make in _WEIGHTINGS.items():
        here, there = make(), make()
        for each in (here, there):
            each.set_special_tokens([0, 1])
        compared, stream = [], list(batches(setting))
        for number, batch in enumerate(stream):
            is_training = number < 16
            compared.append((here.train(is_training)(batch), there.train(is_training)(moved(batch, setting.device))))
        checks += same_weights(name, compared) + same_state(name, here.state_dict(), there.state_dict())
        checks.append(not_constant(name, stream, [pair[0] for pair in compared]))
    return Outcome(checks)


def not_constant(name: str, stream: Sequence[TokenBatch], found: Sequence[Tensor]) -> Check:
    """Some mini-batch has labels of different weights; otherwise the comparison says nothing."""
    of_labels = [one.cpu()[batch.labels.cpu() != IGNORED] for batch, one in zip(stream, found, strict=True)]
    varies = any(bool((one != one[0]).any()) for one in of_labels if one.numel())
    return Check(f"{name}: all labels of every mini-batch weigh the same, so nothing was compared", not varies, 0)


def same_weights(name: str, compared: list[tuple[Tensor, Tensor]], rtol: float = _WEIGHT_RTOL) -> list[Check]:
    """Weights of 0 in the same places, and the others as large up to rounding; not all of them may be 0."""
    expected, found = (torch.cat([pair[side].flatten().cpu() for pair in compared]).double() for side in (0, 1))
    difference = (found - expected).abs() / expected.abs().clamp_min(torch.finfo(torch.float64).tiny)
    return [
        Check(f"{name}: zeros in other places", float(((found == 0) != (expected == 0)).sum()), 0),
        Check(f"{name}: relative difference of weights", float(difference.nan_to_num(nan=torch.inf).max()), rtol),
        Check(f"{name}: no weights", float((expected == 0).all()), 0),
    ]


def same_state(name: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[Check]:
    """The state, bit for bit."""
    wrong = {key for key in expected if key in found and not torch.equal(expected[key].cpu(), found[key].cpu())}
    return [Check(f"{name}: tensors of the state that differ", len(wrong | (expected.keys() ^ found.keys())), 0)]


def losses(setting: Setting, dtype: str) -> Outcome:
    """Gradients of every way to compute the loss on the device, against float64 on the CPU."""
    sizes = (256, 32, 100) if setting.tiny else (2048, 128, 4096)
    inputs = make_inputs(Case("check", *sizes, dtype, rounds=1), "cpu")
    checks, results = [], {}
    for name, way in WAYS.items():
        if way.package and (setting.device == "cpu" or not is_installed(way.package)):
            results[name] = "not installed, or no GPU"
            continue
        there = Inputs(
            leaves(inputs, setting.device), inputs.labels.to(setting.device), inputs.weights.to(setting.device)
        )
        try:
            forward_and_backward(way, there)
        except Exception as error:
            if not way.package:
                raise
            results[name] = f"{type(error).__name__}: {error}"  # what a peer says of this case
            continue
        counted = inputs.weights if way.is_weighted else (inputs.labels != IGNORED)
        exact = Inputs(leaves(inputs, "cpu", torch.float64), inputs.labels, counted.double())
        forward_and_backward(WAYS["plain"], exact)
        for leaf, tensor in there.leaves().items():
            error_of_gradient = relative_error(tensor.grad, exact.leaves()[leaf].grad)
            results[f"{name}, {leaf}"] = f"{error_of_gradient:.2e}"
            if not way.package:  # a peer's errors are not ours
                limit = _GRADIENT_EPS * torch.finfo(inputs.head.weight.dtype).eps
                checks.append(Check(f"{name}: error of the gradient of {leaf}", error_of_gradient, limit))
    return Outcome(checks, results)


def leaves(inputs: Inputs, device: str, dtype: torch.dtype | None = None) -> HeadInput:
    """Copy hidden states and head as leaves of a graph."""
    return HeadInput(*(leaf.detach().to(device, dtype, copy=True).requires_grad_() for leaf in inputs.head[:2]))


def relative_error(found: Tensor | None, exact: Tensor | None) -> float:
    """In the 2-norm."""
    assert found is not None
    assert exact is not None
    return float((found.cpu().double() - exact).norm() / exact.norm())


def cuda_graph(setting: Setting, _: str) -> Outcome:
    """Weightings captured in a CUDA graph: weights and state of every replay, bit for bit those without a graph."""
    if setting.device == "cpu":
        raise NotPossible("a CUDA graph needs a GPU")
    checks = []
    for name in _CAPTURED:
        eager, captured = _WEIGHTINGS[name](), _WEIGHTINGS[name]()
        stream = [
            moved(batch, setting.device)._replace(document_ids=None) for batch in batches(setting, same_shape=True)
        ]
        first, *others = stream
        expected = [eager(batch).clone() for batch in stream][1:]
        # Warm-up on a stream of its own, as torch.cuda.graph asks for, lays out the tables or moves them.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            captured(first)
        torch.cuda.current_stream().wait_stream(side)
        static = first._replace(labels=first.labels.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weights_of_static = captured(static)
        compared = []
        for batch, weights_of_batch in zip(others, expected, strict=True):
            static.labels.copy_(batch.labels)
            graph.replay()
            compared.append((weights_of_batch, weights_of_static.clone()))
        checks += same_weights(name, compared, rtol=0.0)
        checks += same_state(name, eager.state_dict(), captured.state_dict())
        checks.append(not_constant(name, others, expected))
    return Outcome(checks)


def compiled(setting: Setting, _: str) -> Outcome:
    """Weightings under ``torch.compile`` without a graph break, against the same on the same device without it."""
    if setting.device == "cuda" and importlib.util.find_spec("triton") is None:
        raise NotPossible("torch.compile needs triton on a GPU: carry its wheel along")
    checks = []
    for name in _COMPILED:
        torch._dynamo.reset()
        plain, module = _WEIGHTINGS[name](), _WEIGHTINGS[name]()
        graph = torch.compile(module, fullgraph=True, backend="aot_eager" if setting.tiny else "inductor")
        compared, stream = [], list(batches(setting, same_shape=True))
        for batch in stream:
            given = moved(batch, setting.device)._replace(document_ids=None)
            arguments = given._asdict()
            labels = arguments.pop("labels")
            compared.append((plain(given), graph(labels, **arguments)))
        checks += same_weights(name, compared) + same_state(name, plain.state_dict(), module.state_dict())
        checks.append(not_constant(name, stream, [pair[0] for pair in compared]))
    return Outcome(checks)
