"""Two models of transformers and what they say; run as a script, a new process that loads them from checkpoints."""

import sys
from pathlib import Path

import torch

import blockscale as bs
from blockscale.demo.minilm import model_folder


def tiny_llama(seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def minilm(trained):
    from transformers import BertConfig, BertModel

    if trained:
        return BertModel.from_pretrained(model_folder()).eval()
    return BertModel(BertConfig.from_pretrained(model_folder())).eval()


def token_ids():
    return torch.arange(18).view(2, 9) * 13 % 251


@torch.no_grad()
def outputs(models):
    return [models["llama"](token_ids()).logits, models["minilm"](token_ids()).last_hidden_state]


def main(folder):
    models = {"llama": tiny_llama(seed=5), "minilm": minilm(trained=False)}
    for name, model in models.items():
        bs.nn.load_into(model, folder / name)
    torch.save(outputs(models), folder / "outputs.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
