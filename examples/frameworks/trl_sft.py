"""trl's SFTTrainer: a class of two lines. `save_steps`, `save_total_limit` and `resume_from_checkpoint` keep their meaning.

Restored: the same as in hf_trainer.py. transformers shards the model with FSDP2 while it loads it, also on CPUs.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from hf_trainer import PrintProgress
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

from replicated_ckpt.integrations.transformers import ReplicatedTrainerMixin

PAD, END = "<pad>", "</s>"
WORDS = [PAD, END, *(str(number) for number in range(98))]


class ReplicatedSFTTrainer(ReplicatedTrainerMixin, SFTTrainer):
    """The mixin works for any other trainer of trl, too."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=PAD))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END)


def make_model(directory: str) -> None:
    """Writes a small model with random weights, before there is a process group: after that, only rank 0 would write."""
    set_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, pad_token_id=0, eos_token_id=1, **size)
    LlamaForCausalLM(config).save_pretrained(directory)


def main() -> None:
    """One rank, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="this node's store: a directory on a node-local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    output = tempfile.mkdtemp(prefix="sft-")  # differs by rank: no part of a checkpoint is there
    make_model(output)
    texts = [" ".join(str((index + place) % 98) for place in range(15)) for index in range(96)]
    settings = SFTConfig(
        output_dir=output,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        save_steps=arguments.save_every,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        lr_scheduler_type="constant",  # the same for runs of any length
        disable_tqdm=True,
        seed=1,
    )
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())  # with `fsdp=True` in SFTConfig, CPUs would use DDP
    trainer = ReplicatedSFTTrainer(
        model=LlamaForCausalLM.from_pretrained(output, distributed_config=sharding),
        args=settings,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        callbacks=[PrintProgress()],
        replicated_root=arguments.root,
    )
    trainer.train(resume_from_checkpoint=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
