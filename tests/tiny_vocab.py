"""Minimal working tokenizers for the random models: SentencePiece with byte tokens, byte-level BPE, and a toy alphabet."""

from __future__ import annotations

from dataclasses import dataclass, field

import gguf

_WORDS = """
the
"""
CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"(){}[]-_=+*/<>#"
TOY_CHARS = 'abcdefgh0123[]{}",:.- ijklmnopq'
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class Vocab:
    """Tokenizer of a file: model is llama.cpp's name of the algorithm, the control tokens come first."""

    model: str
    tokens: list[str]
    types: list[int]
    bos: int
    eos: int
    n_control: int
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)


def spm_vocab(n_vocab: int) -> Vocab:
    """A SentencePiece vocabulary: 3 control tokens, 256 bytes, characters, growing pieces of common words."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    pieces = list(dict.fromkeys(["\u2581", *CHARS, *_prefixes("\u2581")]))
    pieces = _fit(pieces, n_vocab - len(tokens))
    # the earlier a piece, the sooner it is merged
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces))]
    types += [kinds.NORMAL] * len(pieces)
    return Vocab("llama", tokens + pieces, [int(t) for t in types], 1, 2, 3, scores=scores)


def bpe_vocab(n_vocab: int) -> Vocab:
    """A byte-level BPE vocabulary: one control token, 256 bytes, growing pieces of common words with their merges."""
    tokens = ["<|endoftext|>", *(_spell_byte(byte) for byte in range(256))]
    pieces = _fit(_prefixes(_spell_byte(0x20)), n_vocab - len(tokens))
    merges = [f"{piece[:-1]} {piece[-1]}" for piece in pieces if not piece.startswith("<pad")]
    return _bpe(tokens + pieces, merges)


def toy_vocab(n_vocab: int) -> Vocab:
    """n_vocab tokens: the end of text, single characters with which a grammar can spell lists, and "ab"."""
    chars = TOY_CHARS[: n_vocab - 2]
    return _bpe(["<|endoftext|>", *(_spell_byte(ord(char)) for char in chars), "ab"], ["a b"])


def add_vocab(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    """Write the tokenizer fields."""
    writer.add_tokenizer_model(vocab.model)
    if vocab.merges:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(vocab.merges)
    else:
        writer.add_token_scores(vocab.scores)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    writer.add_bos_token_id(vocab.bos)
    writer.add_eos_token_id(vocab.eos)
    writer.add_add_bos_token(vocab.model == "llama")
    writer.add_chat_template(CHAT_TEMPLATE)


def _bpe(tokens: list[str], merges: list[str]) -> Vocab:
    types = [int(gguf.TokenType.CONTROL)] + [int(gguf.TokenType.NORMAL)] * (len(tokens) - 1)
    return Vocab("gpt2", tokens, types, 0, 0, 1, merges=merges)


def _prefixes(space: str) -> list[str]:
    """Every prefix of two or more characters of the words after a space, shorter ones of earlier words first."""
    spelled = [space + word for word in _WORDS.split()]
    return list(dict.fromkeys(word[:size] for word in spelled for size in range(2, len(word) + 1)))


def _fit(pieces: list[str], count: int) -> list[str]:
    """Cut or pad a list of pieces to exactly count."""
    return pieces[:count] + [f"<pad{number}>" for number in range(count - len(pieces))]


def _spell_byte(byte: int) -> str:
    """Spell a byte as GPT-2's tokenizer does: printable characters as themselves, the others shifted above 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    others = [other for other in range(256) if other not in printable]
    return chr(256 + others.index(byte))
