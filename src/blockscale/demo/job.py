"""The job itself: quantise the encoder, run it, compare."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from blockscale import NVFP4Tensor
from blockscale.demo import emulation
from blockscale.demo.layers import Layer, measure, quantise
from blockscale.demo.minilm import MiniLM, linear_layers, load_tokenizer, model_folder
from blockscale.demo.sentences import SENTENCES
from blockscale.demo.similarity import METHODS, REQUIRED, Similarity, cosines, nvfp4_linear

POOLER = "pooler.dense"  # sentence embeddings do not use it, so it is measured but not run

Advance = Callable[[], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""(what is being done, number of steps) -> a context whose value is called after each step."""


@dataclass(frozen=True)
class Sentence:
    text: str
    tokens: int


@dataclass(frozen=True)
class Report:
    """All that the job found; `seconds` is its wall time. `emulated` is the layer, or why it was left out."""

    layers: Sequence[Layer]
    sentences: Sequence[Sentence]
    runs: Sequence[Similarity]
    seconds: float
    emulated: emulation.EmulatedLayer | str

    @property
    def passed(self) -> bool:
        kernel = isinstance(self.emulated, str) or self.emulated.passed
        return kernel and all(run.passed for run in self.runs)


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain little from torch's threads, and on a busy machine lose much by waiting for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def run(progress: Progress) -> Report:
    """Quantises every layer by every method and embeds all sentences in fp32 and in each kind of NVFP4.

    Runs in one thread, whatever torch is set to.

    Raises:
        MissingPackage: the weights or the tokenizers library are not installed.
    """
    start = time.perf_counter()
    folder = model_folder()
    tokenizer = load_tokenizer(folder)
    model = MiniLM.load(folder)
    sentences = [torch.tensor(tokenizer.encode(text).ids) for text in SENTENCES]
    layers, quantised = quantise_model(model, progress)
    runs = compare(model, quantised, sentences, progress)
    described = [Sentence(text, len(ids)) for text, ids in zip(SENTENCES, sentences, strict=True)]
    emulated = emulate_layer(model, sentences, progress)
    return Report(layers, described, runs, time.perf_counter() - start, emulated)


def emulate_layer(
    model: MiniLM, sentences: Sequence[torch.Tensor], progress: Progress
) -> emulation.EmulatedLayer | str:
    """A layer by the B200's kernel on the software GPU, or why there is none."""
    reason = emulation.why_not()
    if reason is not None:
        return reason
    with progress(f"compiling a kernel for {emulation.ARCH} and running it", 1) as advance:
        layer = emulation.emulate(model, sentences)
        advance()
    return layer


def quantise_model(model: MiniLM, progress: Progress) -> tuple[list[Layer], dict[str, dict[str, NVFP4Tensor]]]:
    """A description of every layer, and layer by layer its weights by method."""
    layers: list[Layer] = []
    quantised: dict[str, dict[str, NVFP4Tensor]] = {}
    names = [*linear_layers(), POOLER]
    with progress("quantising", len(names)) as advance:
        for name in names:
            quantised[name] = quantise(model.weight(name))
            layers.append(measure(name, model.weight(name), quantised[name]))
            advance()
    return layers, quantised


def compare(
    model: MiniLM,
    quantised: Mapping[str, Mapping[str, NVFP4Tensor]],
    sentences: Sequence[torch.Tensor],
    progress: Progress,
) -> list[Similarity]:
    """The encoder's embeddings in every kind of NVFP4 against those in fp32."""
    exact = model.embed(sentences, model.fp32_linear)
    cases = [(kind, method) for kind in REQUIRED for method in METHODS]
    runs = []
    with progress("embedding", len(cases) * len(linear_layers())) as advance:
        for kind, method in cases:
            weights = {name: by_method[method] for name, by_method in quantised.items()}
            embedded = model.embed(sentences, nvfp4_linear(model, weights, method, kind, advance))
            runs.append(Similarity(method, kind, cosines(exact, embedded)))
    return runs
