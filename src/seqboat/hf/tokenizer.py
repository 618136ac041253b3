"""The tokenizer of byte-level models: token ids are the bytes of UTF-8.

It is a plain fast tokenizer of the library, with a vocabulary of 256 tokens and no merges, so that its files load
anywhere. Text that happens to spell a special token is read as text: every string is encoded as its bytes.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = 0
"""The byte that pads sequences, and that programs take for the end of a text if they need one. Text does not contain
it, and attention_mask marks padding anyway."""


def byte_names() -> list[str]:
    """A printable character for every byte, as in the library's byte-level tokenizers.

    Bytes that print as themselves in Latin-1 keep their character; the others count up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer(padding_side: str = "left", max_length: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are bytes.

    Args:
        padding_side: "left" for generation; either side for everything else.
        max_length: bytes that `truncation=True` keeps; no limit by default.
    """
    names = byte_names()
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # invalid UTF-8 becomes U+FFFD, only where it is invalid
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=names[PAD],
        eos_token=names[PAD],
        padding_side=padding_side,
        **({} if max_length is None else {"model_max_length": max_length}),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
