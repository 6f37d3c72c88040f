"""trl's SFTTrainer with FSDP2: the callback of `hf_trainer.py`, under an output directory that every rank names anew."""

import argparse
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import IterableDataset
from hf_trainer import BATCH, Checkpoints
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

PAD, END = "<pad>", "</s>"
WORDS = [PAD, END, *(str(number) for number in range(98))]


class Texts:
    """Made-up text that counts, not yet tokenized. It begins where it has been read to: this is what resumes the data."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self) -> Iterator[dict[str, str]]:
        index = self.step * BATCH * dist.get_world_size()
        while True:
            yield {"text": " ".join(str((index + place) % 98) for place in range(15))}
            index += 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=PAD))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END)


def make_model(directory: str) -> None:
    """A small one with random weights, where there could be any. Once there is a process group, only rank 0 would write."""
    set_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, pad_token_id=0, eos_token_id=1, **size)
    LlamaForCausalLM(config).save_pretrained(directory)


def train(arguments: argparse.Namespace, directory: str) -> None:
    """From wherever we are to `--steps`."""
    settings = SFTConfig(
        output_dir=str(arguments.root.parent / f"{datetime.now(UTC):sft-%Y%m%d-%H%M%S.%f}"),  # drawn on each rank
        max_steps=arguments.steps,
        per_device_train_batch_size=BATCH,
        save_strategy="no",  # the callback saves
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        seed=1,
    )
    texts = Texts()
    checkpoints = Checkpoints(arguments.root, arguments.save_every, texts)
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())  # FSDP2, on CPUs too; `fsdp=True` is DDP there
    trainer = SFTTrainer(
        model=LlamaForCausalLM.from_pretrained(directory, distributed_config=sharding),
        args=settings,
        train_dataset=IterableDataset.from_generator(texts),
        processing_class=tokenizer(),
        callbacks=[checkpoints],
    )
    checkpoints.trainer = trainer
    trainer.train()


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory)
        train(arguments, directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
