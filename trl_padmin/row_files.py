"""Row lengths from files: CSV or JSONL with counts, and the parquet files that TRL writes."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path


_COLUMNS = ("prompt_tokens", "completion_tokens")

Row = tuple[int, int]  # prompt tokens, completion tokens


def read_rows(paths: Sequence[Path], tokenizer: str | None = None) -> list[Row]:
    """Row lengths from CSV, JSONL or parquet files; a folder stands for the parquet files in it.

    Args:
        paths (`Sequence[Path]`): Read in the order given. All need columns `prompt_tokens` and `completion_tokens`,
            except that parquet files may have the columns `prompt` and `completion` that TRL logs.
        tokenizer (`str`, *optional*): Hub name or folder of the tokenizer that counts the latter. TRL logs
            completions as decoded text, without special tokens, so their lengths may be off by a few tokens.

    Raises:
        `OSError`: a file cannot be read.
        `ValueError`: a file is of another kind, is empty, lacks a column, or holds something else than counts.
    """
    files = []
    for path in paths:
        found = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} is a folder without parquet files. TRL writes them to `OUTPUT_DIR/completions`.")
        files += found
    rows, previous = [], None
    for file in files:
        reader = {".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(file.suffix.lower())
        if reader is None:
            raise ValueError(
                f"{file}: `{file.suffix}` is not a kind of file that is read; give .csv, .jsonl, .parquet."
            )
        columns = reader(file)
        if not next(iter(columns.values()), []):
            raise ValueError(f"{file} has no rows.")
        if columns == previous:  # TRL logs a generation batch again at each log until there is a new one
            continue
        previous = columns
        rows += _lengths(file, columns, tokenizer)
    return rows


def _lengths(file: Path, columns: dict[str, list], tokenizer: str | None) -> list[Row]:
    if all(name in columns for name in _COLUMNS):
        return [
            tuple(_count(file, name, value) for name, value in zip(_COLUMNS, row, strict=True))
            for row in zip(*(columns[name] for name in _COLUMNS), strict=True)
        ]
    if not ("prompt" in columns and "completion" in columns and file.suffix.lower() == ".parquet"):
        missing = [name for name in _COLUMNS if name not in columns]
        raise ValueError(f"{file} has no column `{missing[0]}`; its columns are {', '.join(columns) or 'none'}.")
    if tokenizer is None:
        raise ValueError(
            f"{file} holds text, as TRL logs it. Give `--tokenizer` the hub name or folder of the model's tokenizer."
        )
    count = _Counter.of(tokenizer)
    return [
        count(prompt, completion) for prompt, completion in zip(columns["prompt"], columns["completion"], strict=True)
    ]


def _count(file: Path, name: str, value: object) -> int:
    try:
        count = int(value)
        if count != float(value) or count < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{file}: `{name}`={value!r} is not a number of tokens.") from None
    return count


def _read_csv(file: Path) -> dict[str, list]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return _as_columns(list(csv.DictReader(lines)))


def _read_jsonl(file: Path) -> dict[str, list]:
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}, line {number} is not JSON: {error}.") from None
            if not isinstance(records[-1], dict):
                raise ValueError(f"{file}, line {number} is not an object with the columns as keys.")
    return _as_columns(records)


def _as_columns(records: Sequence[dict]) -> dict[str, list]:
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def _read_parquet(file: Path) -> dict[str, list]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a parquet file: {error}.") from None
    wanted = [name for name in (*_COLUMNS, "prompt", "completion") if name in table.column_names]
    return table.select(wanted or table.column_names).to_pydict()


class _Counter:
    """Counts the tokens of prompts and completions, both texts or both lists of messages."""

    _loaded: dict[str, "_Counter"] = {}

    @classmethod
    def of(cls, name: str) -> "_Counter":
        if name not in cls._loaded:
            cls._loaded[name] = cls(name)
        return cls._loaded[name]

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name)

    def __call__(self, prompt: str | list[dict], completion: str | list[dict]) -> Row:
        if isinstance(prompt, str):
            return len(self._tokenizer(prompt)["input_ids"]), self._text(completion) + 1
        prompt, completion = [[_without_missing(m) for m in messages] for messages in (prompt, completion)]
        prompt_tokens = self._chat(prompt, add_generation_prompt=True)
        if len(completion) == 1 and isinstance(completion[0].get("content"), str):
            return prompt_tokens, self._text(completion[0]["content"]) + 1
        return prompt_tokens, max(0, self._chat(prompt + completion) - prompt_tokens)

    def _text(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _chat(self, messages: list[dict], **kwargs) -> int:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        return self._text(text)


def _without_missing(message: dict) -> dict:
    """A parquet file gives every message the keys of all messages."""
    return {key: value for key, value in message.items() if value is not None}
