"""The collators: what stays of the parent's batch, element by element, and that a model's loss and gradients stay too.

Not exercised here: trainers (a collator's whole effect is its batch), image batches, several data loader workers.
"""

import copy
import pickle
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers
from harness import EOS, PAD, VOCAB, tiny_model, tokenizer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as SFTDataCollatorForLanguageModeling

from trl_padmin import collators
from trl_padmin.collators import (
    PaddingMinimizingCollator,
    PadminDataCollatorForLanguageModeling,
    PadminDataCollatorForPreference,
    PadminDataCollatorForSeq2Seq,
    PadminDataCollatorWithPadding,
    PadminSFTDataCollatorForLanguageModeling,
    minimize_padding,
)


FIXED = 64
LENGTHS = (3, 20, 9, 14)
FOREIGN_PAD = 7
BIASED_MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "use_bias": True}
MODELS = {"qwen2": {}, "jamba": {}, "mamba2": BIASED_MAMBA2}


@pytest.fixture(autouse=True)
def warned(monkeypatch):
    """The warnings of a test, each as often as it is given."""
    messages = []
    monkeypatch.setattr(collators.logger, "warning_once", messages.append)
    return messages


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return tiny_model(request.param, **MODELS[request.param]).eval()


def features(
    lengths: Sequence[int] = LENGTHS,
    *,
    side: str = "right",
    pad: int = PAD,
    has_mask: bool = True,
    prompt_tokens: int | None = None,
    width: int = FIXED,
    seed: int = 0,
) -> list[dict[str, list[int]]]:
    """Rows tokenized to a fixed length: random ids with an eos inside and at the end.

    With `prompt_tokens`, they have labels: -100 on the first so many tokens and on padding.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(8, VOCAB, (length,), generator=generator).tolist()
        ids[length // 2] = ids[-1] = EOS
        row = {"input_ids": ids, "attention_mask": [1] * length}
        if prompt_tokens is not None:
            row["labels"] = [-100] * prompt_tokens + ids[prompt_tokens:]
        for key, fill in (("input_ids", pad), ("attention_mask", 0), ("labels", -100)):
            if key in row:
                filler = [fill] * (width - length)
                row[key] = row[key] + filler if side == "right" else filler + row[key]
        if not has_mask:
            del row["attention_mask"]
        rows.append(row)
    return rows


def sided(side: str, pad_is_eos: bool = False) -> transformers.PreTrainedTokenizerFast:
    inner = tokenizer(pad_is_eos)
    inner.padding_side = side
    return inner


def kept_by_oracle(
    batch: Mapping[str, torch.Tensor], side: str = "right", multiple: int = 1
) -> dict[str, list[list[int]]]:
    """What is kept of a batch with a mask, cell by cell."""
    table = {key: value.tolist() for key, value in batch.items()}
    width = len(table["input_ids"][0])

    def alive(row, column):
        scored = any(table[key][row][column] for key in ("completion_mask", "assistant_masks") if key in table)
        labelled = "labels" in table and table["labels"][row][column] != -100
        return bool(table["attention_mask"][row][column] or scored or labelled)

    places, needed = [], 0
    for row in range(len(table["input_ids"])):
        cells = [column for column in range(width) if alive(row, column)]
        inside = list(range(cells[0], cells[-1] + 1)) if cells else []
        places.append(inside + [column for column in range(width) if column not in inside])
        needed = max(needed, len(inside))
    if side == "keep":
        columns = [c for c in range(width) if any(alive(row, c) for row in range(len(places)))]
        places = [list(range(columns[0], columns[-1] + 1))] * len(places)
        needed = len(places[0])
    while needed % multiple:
        needed += 1
    return {
        key: [[cells[column] for column in places[row][:needed]] for row, cells in enumerate(rows)]
        for key, rows in table.items()
    }


def assert_is_kept(ours: Mapping[str, torch.Tensor], parent: Mapping[str, torch.Tensor], **options) -> None:
    expected = kept_by_oracle(parent, **options)
    assert ours.keys() == parent.keys()
    for key, values in expected.items():
        assert ours[key].dtype == parent[key].dtype
        assert ours[key].tolist() == values, key


@contextmanager
def in_float64():
    """Lets transformers compute in float64 also where it asks for float32: norms, rotary angles, scans, the loss."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def widened(value):
        return torch.float64 if value is torch.float32 else value

    def to_wide(self, *args, **kwargs):
        return to(self, *map(widened, args), **{key: widened(value) for key, value in kwargs.items()})

    def softmax_wide(*args, dtype=None, **kwargs):
        return softmax(*args, dtype=widened(dtype), **kwargs)

    with (
        mock.patch.object(torch.Tensor, "to", to_wide),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.nn.functional, "softmax", softmax_wide),
    ):
        yield


def loss_and_gradients(model, *batches: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss per scored token over batches, whatever their padding, and its gradients."""
    model.zero_grad()
    counts = [(batch["labels"][:, 1:] != -100).sum().item() for batch in batches]
    total = torch.zeros((), dtype=torch.float64)
    with in_float64():
        for batch, count in zip(batches, counts, strict=True):
            loss = model(**batch).loss * (count / sum(counts))
            assert loss.dtype == torch.float64
            loss.backward()
            total += loss.detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_loss(model, ours: Sequence[Mapping], truth: Sequence[Mapping]) -> None:
    (our_loss, our_gradients), (true_loss, true_gradients) = (
        loss_and_gradients(model, *batches) for batches in (ours, truth)
    )
    assert abs(our_loss - true_loss) <= 1e-9
    assert our_gradients.keys() == true_gradients.keys()
    scale = max(gradient.abs().max() for gradient in true_gradients.values())
    assert scale > 1e-3
    for name, gradient in true_gradients.items():
        assert (our_gradients[name] - gradient).abs().max() <= 1e-9 * scale, name


def rows_alone(rows: Sequence[Mapping[str, Sequence[int]]]) -> list[dict[str, torch.Tensor]]:
    """Each row as a batch without padding; labels are the ids unless it has some."""
    batches = []
    for row in rows:
        places = [place for place, real in enumerate(row["attention_mask"]) if real]
        ids, labels = ([[row.get(key, row["input_ids"])[p] for p in places]] for key in ("input_ids", "labels"))
        batches.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)})
    return batches


def tensors(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


# Values


@pytest.mark.parametrize("multiple", [None, 8, 3])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_language_modeling_keeps_the_parents_values(side, pad_is_eos, multiple):
    inner = sided(side, pad_is_eos)
    rows = features(side=side, pad=inner.pad_token_id)
    parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False, pad_to_multiple_of=multiple)(rows)
    ours = PadminDataCollatorForLanguageModeling(inner, mlm=False, pad_to_multiple_of=multiple)(rows)
    assert_is_kept(ours, parent, multiple=multiple or 1)
    assert ours["input_ids"].size(1) == {None: 20, 8: 24, 3: 21}[multiple]
    assert type(ours) is type(parent)


@pytest.mark.parametrize("side", ["right", "left"])
def test_seq2seq_keeps_eos_labels_when_pad_is_eos(side):
    inner = sided(side, pad_is_eos=True)
    rows = features(side=side, pad=EOS, prompt_tokens=1)
    parent = transformers.DataCollatorForSeq2Seq(inner)(rows)
    ours = PadminDataCollatorForSeq2Seq(inner)(rows)
    assert_is_kept(ours, parent)
    for row, length in zip(ours["labels"].tolist(), LENGTHS, strict=True):
        assert row[0] == -100
        assert row[length // 2] == row[length - 1] == EOS
        assert row[length:] == [-100] * (20 - length)


@pytest.mark.parametrize("side", ["right", "left"])
def test_keep_cuts_on_both_sides_and_moves_nothing(side):
    rows = features(side=side)
    for row in rows:
        for key, fill in (("input_ids", PAD), ("attention_mask", 0)):
            row[key] = [fill] * 2 + row[key] + [fill] * 3
    inner = sided(side)
    parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)(rows)
    ours = PadminDataCollatorForLanguageModeling(inner, mlm=False, padding_side="keep")(rows)
    assert_is_kept(ours, parent, side="keep")
    assert ours["input_ids"].size(1) == 20
    first = 2 if side == "right" else 46
    for width in (24, 32):  # rounded up to the right as far as the batch reaches, then to the left
        rounded = minimize_padding(parent, pad_to_multiple_of=8 if width == 24 else 32, padding_side="keep")
        start = min(first, FIXED + 5 - width)
        assert torch.equal(rounded["input_ids"], parent["input_ids"][:, start : start + width])


def random_batch(seed: int) -> dict[str, torch.Tensor]:
    """Padding on both sides, gaps, labels and completion masks on some cells whose mask is 0, a row without tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, shape=(5, 17)):
        return torch.randint(0, high, shape, generator=generator)

    columns, first, last = torch.arange(17), draw(9, (5, 1)), 8 + draw(9, (5, 1))
    inside = (columns >= first) & (columns <= last) & (torch.arange(5) != draw(5, (1,)))[:, None]
    ids, mask = draw(VOCAB), (inside & (draw(6) > 0)).long()
    scored = inside & (draw(2) > 0)
    return {
        "attention_mask": mask,
        "input_ids": ids,
        "labels": ids.masked_fill(~scored, -100),
        "completion_mask": scored & (draw(3) > 0),
        "token_type_ids": draw(9),
        "mm_token_type_ids": draw(9),
        "position_ids": columns.repeat(5, 1),
        "special_tokens_mask": draw(2),
        "assistant_masks": torch.zeros(5, 17, dtype=torch.long),
    }


@pytest.mark.parametrize("side", ["right", "keep"])
@pytest.mark.parametrize("left_out", ["labels", "completion_mask", "position_ids"])
def test_every_column_moves_with_the_ids(side, left_out):
    for seed in range(20):
        batch = random_batch(seed)
        del batch[left_out]
        assert_is_kept(minimize_padding(batch, padding_side=side), batch, side=side)


def by_mask_only(batch):
    mask = batch["attention_mask"]
    return {key: minimize_padding({"input_ids": batch[key], "attention_mask": mask})["input_ids"] for key in batch}


def by_ids(batch):
    return minimize_padding({**batch, "attention_mask": (batch["input_ids"] != PAD).long()})


def one_too_narrow(batch):
    return {key: value[:, :-1].contiguous() for key, value in minimize_padding(batch).items()}


def labels_one_off(batch):
    ours = minimize_padding(batch)
    return {**ours, "labels": ours["labels"].roll(1, dims=1)}


@pytest.mark.parametrize("broken", [by_mask_only, by_ids, one_too_narrow, labels_one_off])
def test_a_broken_layout_is_noticed(broken):
    batch = {key: value for key, value in random_batch(3).items() if key in ("input_ids", "attention_mask", "labels")}
    assert_is_kept(minimize_padding(batch), batch)
    with pytest.raises(AssertionError):
        assert_is_kept(broken(batch), batch)


# Edges of width


def test_rows_of_equal_length_one_row_and_no_tokens():
    inner = sided("left")
    for lengths, width in (((9, 9, 9), 9), ((12,), 12), ((1,), 2), ((1, 1), 2)):
        rows = features(lengths, side="left")
        parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)(rows)
        ours = PadminDataCollatorForLanguageModeling(inner, mlm=False)(rows)
        assert ours["input_ids"].shape == (len(lengths), width)
        assert ours["input_ids"][:, : lengths[0]].tolist() == parent["input_ids"][:, FIXED - lengths[0] :].tolist()
    dead = {"input_ids": torch.ones(2, 6, dtype=torch.long), "attention_mask": torch.zeros(2, 6)}
    for side in ("right", "keep"):
        assert minimize_padding(dead, padding_side=side)["input_ids"].shape == (2, 2)


def test_a_batch_is_never_widened():
    batch = tensors(features((3, 9), width=10))
    assert minimize_padding(batch)["input_ids"].size(1) == 9
    assert minimize_padding(batch, pad_to_multiple_of=8)["input_ids"].tolist() == batch["input_ids"].tolist()
    assert minimize_padding(tensors(features((1,), width=1)))["input_ids"].shape == (1, 1)


def test_the_batch_given_is_not_changed_and_its_memory_not_kept():
    batch = tensors(features())
    before = copy.deepcopy(batch)
    ours = minimize_padding(batch)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], before[key]) for key in before)
    assert all(value.untyped_storage().nbytes() == 4 * 20 * 8 for value in ours.values())


# Padding that no mask tells of


def test_without_a_mask_column_only_unlabelled_tails_are_cut(warned):
    rows = features(has_mask=False)
    parent = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(rows)
    assert parent["attention_mask"].all()
    ours = PadminDataCollatorForLanguageModeling(tokenizer(), mlm=False)(rows)
    assert {key: value.tolist() for key, value in ours.items()} == {k: v[:, :20].tolist() for k, v in parent.items()}
    assert len(warned) == 1 and "taken for padding" in warned[0]


@pytest.mark.parametrize("has_labels", [False, True])
def test_without_a_mask_column_a_last_eos_stays_when_pad_is_eos(has_labels):
    rows = features(pad=EOS, has_mask=False, prompt_tokens=1 if has_labels else None)
    inner = sided("right", pad_is_eos=True)
    if has_labels:
        parent, ours = transformers.DataCollatorForSeq2Seq(inner)(rows), PadminDataCollatorForSeq2Seq(inner)(rows)
        assert parent["labels"][1, 19] == EOS
        width = 21  # the first pad token might be an eos that is not to be learnt
    else:
        parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)(rows)
        ours = PadminDataCollatorForLanguageModeling(inner, mlm=False)(rows)
        width = 20
    assert {key: value.tolist() for key, value in ours.items()} == {
        k: v[:, :width].tolist() for k, v in parent.items()
    }


@pytest.mark.parametrize(
    ("options", "collator_options"),
    [({"side": "left"}, {}), ({}, {"padding_side": "keep"})],
    ids=["a model attends to pads on the left", "a model may not be causal"],
)
def test_without_a_mask_column_the_rest_stays_and_is_said(options, collator_options, warned):
    rows = features(has_mask=False, **options)
    inner = sided(options.get("side", "right"))
    parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)(rows)
    ours = PadminDataCollatorForLanguageModeling(inner, mlm=False, **collator_options)(rows)
    assert {k: v.tolist() for k, v in ours.items()} == {k: v.tolist() for k, v in parent.items()}
    assert len(warned) == 1 and "so they are kept" in warned[0]


def test_without_a_mask_column_nothing_is_cut_unless_labels_are_the_ids(warned):
    rows = features(has_mask=False, prompt_tokens=0)
    changed = [row | {"labels": [3 if label == EOS else label for label in row["labels"]]} for row in rows]
    bare = [{"input_ids": row["input_ids"]} for row in rows]
    inner = tokenizer()
    for parent, ours, given in (
        (transformers.DataCollatorForSeq2Seq(inner), PadminDataCollatorForSeq2Seq(inner), changed),
        (transformers.DataCollatorWithPadding(inner), PadminDataCollatorWithPadding(inner), bare),
    ):
        assert {k: v.tolist() for k, v in ours(given).items()} == {k: v.tolist() for k, v in parent(given).items()}
        assert "so they are kept" in warned.pop() and not warned


def test_without_a_mask_and_a_pad_token_nothing_is_cut(warned):
    batch = tensors(features(has_mask=False, prompt_tokens=0))
    assert minimize_padding(batch)["input_ids"].tolist() == batch["input_ids"].tolist()
    assert len(warned) == 1 and "so they are kept" in warned[0]


def test_rows_that_were_not_padded_before_raise_no_warning(warned):
    rows = [{"input_ids": [EOS, *range(2, n), EOS]} for n in LENGTHS]
    for pad_is_eos in (False, True):
        for side in ("right", "left"):
            inner = sided(side, pad_is_eos)
            for given in (rows, rows[:1], [row["input_ids"] for row in rows]):
                parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)(given)
                ours = PadminDataCollatorForLanguageModeling(inner, mlm=False)(given)
                assert ours["input_ids"].shape == parent["input_ids"].shape
    parent = SFTDataCollatorForLanguageModeling(PAD)(rows)
    assert_is_kept(PadminSFTDataCollatorForLanguageModeling(PAD)(rows), parent)
    assert not warned


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_foreign_pad_id_is_padding_if_the_labels_agree(side, warned):
    inner = sided(side)
    rows = features(side=side, pad=FOREIGN_PAD, prompt_tokens=1)
    assert_is_kept(PadminDataCollatorForSeq2Seq(inner)(rows), transformers.DataCollatorForSeq2Seq(inner)(rows))
    assert not warned
    # The parent makes labels of pads that it does not know, so the model learns them: as much as before.
    parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)(rows)
    ours = PadminDataCollatorForLanguageModeling(inner, mlm=False)(rows)
    assert {k: v.tolist() for k, v in ours.items()} == {k: v.tolist() for k, v in parent.items()}
    assert len(warned) == 1 and "`attention_mask` 0 are scored" in warned[0]


# TRL's collators


def test_sft_collator_takes_padding_from_the_labels_of_rows_padded_before(warned):
    parent, ours = SFTDataCollatorForLanguageModeling(PAD), PadminSFTDataCollatorForLanguageModeling(PAD)
    labelled = features(prompt_tokens=2)
    assert parent(labelled)["attention_mask"].all()  # TRL ignores the mask of the data
    batch = ours(labelled)
    # TRL's collator does not know eos, so one more column than the longest row stays.
    assert {k: v.tolist() for k, v in batch.items()} == {k: v[:, :21].tolist() for k, v in parent(labelled).items()}
    assert "taken for padding" in warned.pop() and not warned
    unlabelled = features()
    assert {k: v.tolist() for k, v in ours(unlabelled).items()} == {
        k: v.tolist() for k, v in parent(unlabelled).items()
    }
    assert "so they are kept" in warned.pop() and not warned


def test_sft_collator_cuts_what_a_max_length_option_leaves():
    rows = [{"input_ids": row["input_ids"][:n]} for row, n in zip(features(), LENGTHS, strict=True)]
    parent = SFTDataCollatorForLanguageModeling(PAD, return_position_ids=True)(rows)
    widened = {
        key: torch.nn.functional.pad(value, (0, 9), value=-100 if key == "labels" else 0)
        for key, value in parent.items()
    }
    ours = PadminSFTDataCollatorForLanguageModeling(PAD, return_position_ids=True)(rows)
    for batch in (ours, minimize_padding(widened)):
        assert {key: value.tolist() for key, value in batch.items()} == {k: v.tolist() for k, v in parent.items()}


@pytest.mark.parametrize("options", [{"padding_free": True}, {"return_position_ids": True}])
def test_packed_and_padding_free_batches_are_left_alone(options):
    rows = [{"input_ids": list(range(2, 2 + n)), "seq_lengths": [2, n - 2]} for n in (5, 9)]
    parent = SFTDataCollatorForLanguageModeling(PAD, pad_to_multiple_of=16, **options)(rows)
    batch = minimize_padding(parent, pad_to_multiple_of=1)
    assert batch.keys() == parent.keys()
    assert all(batch[key] is parent[key] for key in parent)


@pytest.mark.parametrize(
    "extra",
    [
        {"seq_lengths": [[2, 3]]},
        {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "max_length_q": 3},
        {"attention_mask": torch.tensor([[1, 1, 2, 2, 2, 0]])},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])},
        {"position_ids": torch.tensor([[0, 0, 1, 2, 3, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])},
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5]])},
    ],
    ids=lambda extra: "+".join(extra),
)
def test_other_signs_of_packing(extra, warned):
    batch = {"input_ids": torch.arange(6)[None]} | extra
    assert minimize_padding(batch) is batch
    assert not warned


def test_preference_collator_keeps_every_key():
    rows = [
        {
            "prompt_ids": list(range(2, 2 + p)),
            "chosen_ids": [5] * c,
            "rejected_ids": [6] * r,
            "ref_chosen_logps": -1.0 * p,
            "ref_rejected_logps": -2.0 * p,
        }
        for p, c, r in ((3, 4, 1), (2, 2, 9))
    ]
    parent = DataCollatorForPreference(PAD, pad_to_multiple_of=16, max_length=10)(rows)
    for collator, width in (
        (PadminDataCollatorForPreference(PAD, pad_to_multiple_of=16, max_length=10), 16),
        (PaddingMinimizingCollator(DataCollatorForPreference(PAD, pad_to_multiple_of=16, max_length=10)), 10),
    ):
        ours = collator(rows)
        assert ours.keys() == parent.keys()
        for key in ("input_ids", "attention_mask", "completion_mask"):
            assert ours[key].tolist() == parent[key][:, :width].tolist()
        for key in ("ref_chosen_logps", "ref_rejected_logps"):
            assert ours[key] is parent[key] or torch.equal(ours[key], parent[key])
    # Rows of a collator that pads prompts on the left.
    lead = [3, 0, 5, 1]
    batch = {
        key: torch.stack([row.roll(shift) for row, shift in zip(parent[key], lead, strict=True)])
        for key in ("input_ids", "attention_mask", "completion_mask")
    }
    assert_is_kept(minimize_padding(batch), batch)
    assert torch.equal(minimize_padding(batch)["completion_mask"], parent["completion_mask"][:, :10])


# Labels of rows, encoders and decoders


@pytest.mark.parametrize("label", [[0, 2, 1, 1], [[0], [2], [1], [1]], [0.5, 1.0, 0.25, 2.0], [[1.0, 0.0, 1.0]] * 4])
def test_labels_of_rows_stay(label):
    inner = sided("left")
    rows = [row | {"label": value} for row, value in zip(features(side="left"), label, strict=True)]
    parent = transformers.DataCollatorWithPadding(inner)(rows)
    ours = PadminDataCollatorWithPadding(inner)(rows)
    labels = parent.pop("labels")
    assert torch.equal(ours.pop("labels"), labels)
    assert_is_kept(ours, parent)


def encoder_decoder_features(side: str) -> list[dict[str, list[int]]]:
    """Sources padded before, with targets of other lengths that are padded too."""
    rows = features(side=side)
    for row, target in zip(rows, features((9, 2, 11, 5), width=30, side=side, prompt_tokens=0, seed=1), strict=True):
        row["labels"] = target["labels"]
    return rows


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("with_model", [False, True])
def test_encoder_and_decoder_are_cut_on_the_right_each(side, with_model):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=PAD
    )
    t5 = transformers.T5ForConditionalGeneration(config).double().eval()
    options = {"tokenizer": sided(side), "model": t5 if with_model else None}
    parent = transformers.DataCollatorForSeq2Seq(**options)(encoder_decoder_features(side))
    ours = PadminDataCollatorForSeq2Seq(**options)(encoder_decoder_features(side))
    assert ours.keys() == parent.keys()
    assert ("decoder_input_ids" in ours) == with_model
    for key, value in parent.items():
        width = {"right": 11 if key in ("labels", "decoder_input_ids") else 20, "left": value.size(1)}[side]
        assert torch.equal(ours[key], value[:, :width]), key
    assert_same_loss(t5, [ours], [parent])
    broken = {key: value for key, value in ours.items() if key != "decoder_input_ids"}
    broken["labels"] = ours["labels"][:, :-1].contiguous() if side == "right" else ours["labels"].roll(-1, 1)
    with pytest.raises(AssertionError):
        assert_same_loss(t5, [broken], [parent])


def test_decoder_entries_tell_a_decoder_whatever_its_labels():
    batch = tensors(features(side="left", prompt_tokens=0))  # an auto-encoder: the labels are the ids
    batch["decoder_input_ids"] = batch["input_ids"].roll(1, dims=1)
    ours = minimize_padding(batch)
    assert all(torch.equal(ours[key], batch[key]) for key in batch)


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_that_are_not_the_ids_stay_in_their_columns(side, warned):
    batch = tensors(features(side=side, prompt_tokens=1))
    batch["labels"] = torch.where(batch["labels"] == EOS, 3, batch["labels"])
    ours = minimize_padding(batch)
    width = 20 if side == "right" else FIXED
    assert all(torch.equal(ours[key], batch[key][:, :width]) for key in batch)
    assert [message for message in warned if "is not moved" in message] == warned
    assert len(warned) == (side == "left")


# Refusals


B, L = 4, 6


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"attention_mask": torch.ones(B, L, L)}, NotImplementedError),
        ({"attention_mask": torch.ones(B, 1, L, L)}, NotImplementedError),
        ({"attention_mask": {"full_attention": torch.ones(B, 1, L, L)}}, TypeError),
        ({"attention_mask": torch.zeros(B, L).index_fill(1, torch.tensor(0), -torch.inf)}, ValueError),
        ({"attention_mask": torch.ones(B, L + 1)}, ValueError),
        ({"position_ids": torch.ones(3, B, L)}, NotImplementedError),
        ({"position_ids": torch.arange(L)[None]}, ValueError),
        ({"labels": torch.ones(B, L, 2)}, NotImplementedError),
        ({"labels": torch.ones(B + 1, L, dtype=torch.long)}, ValueError),
        ({"completion_mask": torch.ones(B, 3)}, ValueError),
        ({"assistant_masks": [[1] * L] * B}, TypeError),
        ({"decoder_input_ids": torch.ones(B, 3), "decoder_attention_mask": torch.ones(B, 4)}, ValueError),
        ({"input_ids": torch.ones(B, 2, L)}, NotImplementedError),
        ({"input_ids": [[1, 2], [3]]}, TypeError),
        ({"loss_weights": torch.ones(B, L)}, ValueError),
        ({"shifted": torch.ones(B, L - 1)}, ValueError),
        ({"cache_position": torch.arange(L)}, ValueError),
        ({"offset_mapping": torch.ones(B, L, 2)}, ValueError),
        ({"ragged": [[1], [1, 2], [3], [4]]}, ValueError),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_may_have_columns_is_refused_by_name(extra, error):
    batch = {"input_ids": torch.ones(B, L, dtype=torch.long), "attention_mask": torch.ones(B, L)} | extra
    with pytest.raises(error, match=f"`{list(extra)[-1]}`"):
        minimize_padding(batch)


def test_what_has_no_columns_passes():
    extra = {
        "num_items_in_batch": 3,
        "scale": torch.tensor(2.0),
        "index": torch.arange(B),
        "score": torch.ones(B, 1),
        "names": ["a"] * B,
        "pixel_values": torch.ones(9, 3, L, L),
        "labels": None,
    }
    batch = {"input_ids": torch.ones(B, L, dtype=torch.long), "attention_mask": torch.eye(B, L)} | extra
    ours = minimize_padding(batch)
    assert all(ours[key] is value for key, value in extra.items())
    assert ours["input_ids"].shape == (B, 2)
    boolean = minimize_padding({**batch, "attention_mask": torch.eye(B, L, dtype=torch.bool)})
    assert torch.equal(boolean["attention_mask"], ours["attention_mask"].bool())


def test_other_entries_can_be_registered(monkeypatch):
    batch = tensors(features(side="left")) | {"weights": torch.rand(4, FIXED), "vectors": torch.rand(4, 5)}
    monkeypatch.setattr(collators, "COLUMN_KEYS", collators.COLUMN_KEYS | {"weights"})
    monkeypatch.setattr(collators, "ROW_KEYS", collators.ROW_KEYS | {"vectors"})
    ours = minimize_padding(batch)
    assert ours.pop("vectors") is batch.pop("vectors")
    assert_is_kept(ours, batch)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"padding_side": "left"}, ValueError),
        ({"pad_to_multiple_of": 0}, ValueError),
        ({"pad_to_multiple_of": 2.0}, TypeError),
    ],
)
def test_options_are_checked_at_once(options, error):
    makers = [
        lambda: PaddingMinimizingCollator(dict, **options),
        lambda: PadminDataCollatorForLanguageModeling(tokenizer(), mlm=False, **options),
        lambda: PadminDataCollatorForSeq2Seq(tokenizer(), **options),
        lambda: PadminDataCollatorWithPadding(tokenizer(), **options),
        lambda: PadminSFTDataCollatorForLanguageModeling(PAD, **options),
        lambda: PadminDataCollatorForPreference(PAD, **options),
        lambda: minimize_padding(tensors(features()), **options),
    ]
    for make in makers:
        with pytest.raises(error, match=f"`{next(iter(options))}`"):
            make()


def test_masked_language_modeling_keeps_its_side():
    inner = tokenizer()
    inner.mask_token = "<eos>"
    with pytest.raises(NotImplementedError, match="`mlm`"):
        PadminDataCollatorForLanguageModeling(inner)
    rows, options = features(), {"mlm_probability": 0.5, "seed": 3}
    parent = transformers.DataCollatorForLanguageModeling(inner, **options)(rows)
    ours = PadminDataCollatorForLanguageModeling(inner, padding_side="keep", **options)(rows)
    assert (parent["labels"] != -100).any()
    assert_is_kept(ours, parent, side="keep")


# The wrapper


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("has_mask", [True, False])
def test_the_wrapper_equals_the_subclass(side, has_mask):
    rows, inner = features(side=side, has_mask=has_mask, prompt_tokens=1), sided(side)
    for parent, ours in (
        (transformers.DataCollatorForSeq2Seq(inner), PadminDataCollatorForSeq2Seq(inner)),
        (SFTDataCollatorForLanguageModeling(PAD), PadminSFTDataCollatorForLanguageModeling(PAD)),
    ):
        wrapper = pickle.loads(pickle.dumps(PaddingMinimizingCollator(parent)))
        assert {k: v.tolist() for k, v in wrapper(rows).items()} == {k: v.tolist() for k, v in ours(rows).items()}
        assert (wrapper.tokenizer is None) == (not hasattr(parent, "tokenizer"))


def test_the_wrapper_takes_any_callable():
    rows = features(side="left", prompt_tokens=1)
    assert_is_kept(PaddingMinimizingCollator(tensors, pad_to_multiple_of=16)(rows), tensors(rows), multiple=16)


def test_the_mask_of_a_collator_that_tokenizes_is_taken_as_it_is(warned):
    class FromText:
        tokenizer = tokenizer()

        def __call__(self, texts):
            rows = features(width=20, prompt_tokens=0)
            return tensors([row | {"attention_mask": [1] * 20} for row in rows])

    collator = FromText()
    ours = PaddingMinimizingCollator(collator)([{"text": "2 3"}] * 4)
    assert {k: v.tolist() for k, v in ours.items()} == {k: v.tolist() for k, v in collator([]).items()}
    assert not warned


def test_the_wrapper_refuses_what_is_not_callable():
    with pytest.raises(TypeError, match="`inner`=None"):
        PaddingMinimizingCollator(None)


# Loss and gradients


def collated(rows, inner=None, **options):
    """The parent's batch and ours: the language modeling collators, or the Seq2Seq ones for rows with labels."""
    inner = tokenizer() if inner is None else inner
    if "labels" in rows[0]:
        parent, ours = transformers.DataCollatorForSeq2Seq(inner), PadminDataCollatorForSeq2Seq(inner, **options)
    else:
        parent = transformers.DataCollatorForLanguageModeling(inner, mlm=False)
        ours = PadminDataCollatorForLanguageModeling(inner, mlm=False, **options)
    return parent(rows), ours(rows)


RIGHT_PADDED = {
    "masked": {},
    "completion only": {"prompt_tokens": 2},
    "no mask column": {"has_mask": False},
    "foreign pad id": {"pad": FOREIGN_PAD, "prompt_tokens": 0},
    "one row": {"lengths": (13,)},
    "equal rows": {"lengths": (9, 9)},
}


@pytest.mark.parametrize("case", RIGHT_PADDED)
def test_loss_and_gradients_equal_the_parents(model, case):
    parent, ours = collated(features(**RIGHT_PADDED[case]))
    assert parent["input_ids"].size(1) == FIXED
    assert ours["input_ids"].size(1) == max(RIGHT_PADDED[case].get("lengths", LENGTHS))
    assert_same_loss(model, [ours], [parent])


def test_loss_and_gradients_equal_the_parents_when_pad_is_eos(model):
    for rows in (features(pad=EOS), features(pad=EOS, has_mask=False, prompt_tokens=0)):
        parent, ours = collated(rows, sided("right", pad_is_eos=True))
        assert ours["input_ids"].size(1) < FIXED
        assert_same_loss(model, [ours], [parent])


@pytest.mark.parametrize("broken", [one_too_narrow, labels_one_off, by_ids])
def test_a_broken_layout_changes_loss_and_gradients(model, broken):
    rows = features(side="left", prompt_tokens=1)
    for row in rows:  # a pad token among the real ones
        row["input_ids"], row["labels"] = (
            [PAD if t == EOS else t for t in row[key]] for key in ("input_ids", "labels")
        )
    batch = tensors(rows)
    assert_same_loss(model, [minimize_padding(batch)], rows_alone(rows))
    with pytest.raises(AssertionError):
        assert_same_loss(model, [broken(batch)], rows_alone(rows))


LEFT_PADDED = {
    "masked": {},
    "completion only": {"prompt_tokens": 2},
    "foreign pad id": {"pad": FOREIGN_PAD, "prompt_tokens": 0},
    "pad is eos": {"pad": EOS, "prompt_tokens": 0},
    "one row": {"lengths": (13,)},
    "equal rows": {"lengths": (9, 9)},
}


@pytest.mark.parametrize("case", LEFT_PADDED)
def test_left_padded_rows_equal_each_row_alone(model, case):
    rows = features(side="left", **LEFT_PADDED[case])
    _, ours = collated(rows, sided("left", case == "pad is eos"))
    assert_same_loss(model, [ours], rows_alone(rows))


def test_left_padded_rows_of_an_attention_model_equal_the_parents():
    qwen2 = tiny_model("qwen2").eval()
    parent, ours = collated(features(side="left", prompt_tokens=1), sided("left"))
    assert ours["input_ids"].size(1) == 20
    assert_same_loss(qwen2, [ours], [parent])


def test_left_padded_rows_of_a_mamba_with_biases_are_wrong_in_the_parents_layout():
    mamba2 = tiny_model("mamba2", **BIASED_MAMBA2).eval()
    rows = features(side="left", prompt_tokens=1)
    parent, ours = collated(rows, sided("left"))
    assert_same_loss(mamba2, [ours], rows_alone(rows))
    with pytest.raises(AssertionError):
        assert_same_loss(mamba2, [parent], rows_alone(rows))


def test_a_gap_between_tokens_is_not_closed(model):
    rows = features((5, 20, 9, 14), prompt_tokens=4)
    for row in rows:
        row["attention_mask"][1:3] = [0, 0]
    parent, ours = collated(rows)
    assert ours["input_ids"].size(1) == 20
    assert_same_loss(model, [ours], [parent])
    closed = {key: torch.cat([value[:, :1], value[:, 3:]], dim=1) for key, value in ours.items()}
    with pytest.raises(AssertionError):
        assert_same_loss(model, [closed], [parent])
