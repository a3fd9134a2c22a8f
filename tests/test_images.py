"""C15: pictures follow their rows, in each of the layouts in which TRL keeps them.

Rows with 0, 1 and 3 pictures train tiny models built from their configs: Qwen2.5-VL (indexed by patch, pictures of
different sizes), Gemma 3 and LLaVA (by image), Idefics 3 (by row, padded). Gradients of language model and vision
tower are compared with stock TRL's and with each row alone. Tiles (InternVL, LFM2-VL) are followed without a model.

What this does not exercise: image processors, several processes.
"""

import pytest
import torch
import transformers
from harness import Row, perturb_and_save, relative_error, run
from trl import GRPOConfig, GRPOTrainer

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer
from trl_padmin.images import images_by_row, join_images, pick_images


IMAGE = 60  # the placeholder, one for each visual token
COUNTS = (0, 1, 3, 1, 1, 3, 0, 1)
COMPLETIONS = (2, 3, 17, 20, 1, 9, 9, 40)
GRIDS = ((4, 4), (2, 6), (8, 4))  # patches of Qwen's pictures; four make a token
SIDE = 8  # pixels of the other models' pictures

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TOWER = VISION | {"image_size": SIDE, "patch_size": 4}


def qwen(pictures):
    flat = [picture for row in pictures for picture in row]
    return {
        "pixel_values": torch.cat([pixels for pixels, _ in flat]) if flat else torch.zeros(0, 96),
        "image_grid_thw": torch.tensor([[1, *grid] for _, grid in flat]).view(-1, 3),
    }


def by_image(pictures):
    flat = [picture for row in pictures for picture in row]
    return {"pixel_values": torch.stack(flat) if flat else torch.zeros(0, 3, SIDE, SIDE)}


def by_row(pictures):
    most = max(1, *map(len, pictures), 0)
    pixels = torch.zeros(len(pictures), most, 3, SIDE, SIDE)
    mask = torch.zeros(len(pictures), most, SIDE, SIDE, dtype=torch.long)
    for row, own in enumerate(pictures):
        for index, picture in enumerate(own):
            pixels[row, index], mask[row, index] = picture, 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


MODELS = {
    "qwen2_5_vl": {
        "config": {
            "text_config": TEXT
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": 4,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "window_size": 16,
            },
            "image_token_id": IMAGE,
            "video_token_id": 61,
            "vision_start_token_id": 62,
            "vision_end_token_id": 63,
        },
        "join": qwen,
        "types": "mm_token_type_ids",
    },
    "gemma3": {
        "config": {
            "text_config": TEXT | {"sliding_window": 16},
            "vision_config": TOWER | {"model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": 61,
            "eoi_token_index": 62,
        },
        "join": by_image,
        "types": "token_type_ids",
        "tokens": 4,
    },
    "llava": {
        "config": {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 2},
            "image_token_index": IMAGE,
        },
        "join": by_image,
        "types": None,
        "tokens": 4,
    },
    "idefics3": {
        "config": {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER,
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        "join": by_row,
        "types": None,
        "tokens": 1,
    },
}


def tiny(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind]["config"])
    model = transformers.AutoModelForImageTextToText.from_config(config).double()
    perturb_and_save(model)
    return model


def pictured_rows(kind):
    """Rows, and the pictures of each by its ids."""
    generator = torch.Generator().manual_seed(0)
    rows, pictures = [], {}
    for index, (count, length) in enumerate(zip(COUNTS, COMPLETIONS, strict=True)):
        own, prompt = [], [2 + index]
        for picture in range(count):
            prompt.append(3)
            if kind == "qwen2_5_vl":
                grid = GRIDS[(index + picture) % len(GRIDS)]
                own.append((torch.randn(grid[0] * grid[1], 96, generator=generator), grid))
                prompt += [62, *[IMAGE] * (grid[0] * grid[1] // 4), 63]
            else:
                own.append(torch.randn(3, SIDE, SIDE, generator=generator))
                prompt += [IMAGE] * MODELS[kind]["tokens"]
        completion = torch.randint(2, 60, (length,), generator=generator).tolist()
        rows.append(Row((*prompt, 4), tuple(completion)))
        pictures[rows[-1].prompt + rows[-1].completion] = own
    return rows, pictures


class Pictured:
    """Adds to a batch, and to the scoring passes in its making, what TRL adds when a processor saw pictures."""

    kind, pictures = "", {}

    def image_entries(self, ids, mask):
        own = [self.pictures[tuple(row[real].tolist())] for row, real in zip(ids, mask.bool(), strict=True)]
        types = MODELS[self.kind]["types"]
        entries = MODELS[self.kind]["join"](own) | {"num_images": [len(each) for each in own]}
        return entries | ({types: ((ids == IMAGE) & mask.bool()).long()} if types else {})

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        return batch | self.image_entries(ids, mask)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if not torch.is_grad_enabled():
            kwargs |= self.image_entries(input_ids, attention_mask)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )


class EachRowAlone(GRPOTrainer):
    """Stock TRL, scoring each row alone with its own pictures: the truth."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        score, kind = super()._get_per_token_logps_and_entropies, self.kind
        columns = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            real = mask.bool()
            count = int(real[-logits_to_keep:].sum())
            entries = Pictured.image_entries(self, ids[None], mask[None])
            if not sum(entries["num_images"]):
                entries = {MODELS[kind]["types"]: entries[MODELS[kind]["types"]]} if MODELS[kind]["types"] else {}
            entries |= {key: value[:, real] for key, value in entries.items() if "token_type" in key}
            entropy = kwargs.get("compute_entropy", False)
            alone = score(model, ids[real][None], mask[real][None], count, compute_entropy=entropy, **entries)
            pad = (0, logits_to_keep - count)
            columns.append([None if v is None else torch.nn.functional.pad(v, pad) for v in alone])
        return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*columns, strict=True))


def train(trainer_class, kind, **options):
    rows, pictures = pictured_rows(kind)
    pictured = type(trainer_class.__name__, (Pictured, trainer_class), {"kind": kind, "pictures": pictures})
    options = {"num_iterations": 2, "optimizer_steps": 2, "learning_rate": 0.05} | options
    config_class = PadminGRPOConfig if trainer_class is PadminGRPOTrainer else GRPOConfig
    return run(pictured, rows, tiny(kind), config_class=config_class, **options)


def worst_error(mine, theirs):
    assert len(mine.gradients) == len(theirs.gradients) == 2
    return max(relative_error(a, b) for a, b in zip(mine.gradients, theirs.gradients, strict=True))


@pytest.fixture(scope="module")
def truth():
    results = {}

    def of(kind):
        if kind not in results:
            results[kind] = train(EachRowAlone, kind)
        return results[kind]

    return of


@pytest.mark.parametrize("own", [{"overhead_tokens": 5}, {"token_budget": 1}], ids=["by length", "row by row"])
@pytest.mark.parametrize("kind", MODELS)
def test_pictures_follow_their_rows(truth, float64_head, kind, own):
    ours = train(PadminGRPOTrainer, kind, **own)
    towers = [name for name in truth(kind).gradients[0] if "vis" in name]
    assert towers and all(truth(kind).gradients[0][name].abs().max() > 0 for name in towers[:1])
    assert worst_error(ours, truth(kind)) <= 1e-5
    passes = [len(forward["ids"]) for forward in ours.forwards if forward["grad"]]
    assert passes != [2] * 8 and sum(passes) == 16
    # Placeholders of pictures are tokens of a row like any other.
    assert ours.trainer.padding_stats.real_tokens == sum(int(forward["mask"].sum()) for forward in ours.forwards)


@pytest.mark.parametrize("kind", MODELS)
def test_stock_gives_the_same_where_it_is_right(truth, float64_head, kind):
    stock = train(GRPOTrainer, kind)
    assert worst_error(stock, truth(kind)) <= 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_control_pictures_of_other_rows_are_seen(monkeypatch, truth, float64_head, kind):
    def swapped(batch, rows):
        found = images_by_row(batch, rows)
        if isinstance(found["pixel_values"], list):  # rows with equal pictures, so that shapes still fit
            shapes = [tuple(each.shape) for each in found["pixel_values"]]
            pairs = [(i, j) for i in range(rows) for j in range(i) if shapes[i] == shapes[j] and shapes[i][0]]
            for i, j in pairs[:1]:
                values = found["pixel_values"]
                values[i], values[j] = values[j], values[i]
        else:
            found["pixel_values"] = found["pixel_values"] * 1.5
        return found

    monkeypatch.setattr("trl_padmin.scoring.images_by_row", swapped)
    assert worst_error(train(PadminGRPOTrainer, kind, overhead_tokens=5), truth(kind)) > 1e-3


# Layouts without a model


def entries(kind, **more):
    rows, pictures = pictured_rows(kind)
    own = [pictures[row.prompt + row.completion] for row in rows]
    return MODELS[kind]["join"](own) | {"num_images": list(COUNTS)} | more, own


@pytest.mark.parametrize("groups", [[(0, 6)], [(5, 2, 7), (0,), (1, 3, 4, 6)]])
@pytest.mark.parametrize("kind", MODELS)
def test_pictures_of_a_group_are_those_of_its_rows(kind, groups):
    batch, own = entries(kind)
    split = images_by_row(batch, len(COUNTS))
    for group in groups:
        picked = pick_images(split, group)
        assert picked["num_images"] == [COUNTS[row] for row in group]
        expected = MODELS[kind]["join"]([own[row] for row in group])
        for key, value in expected.items():
            if not sum(picked["num_images"]):
                assert picked[key] is None
            elif kind == "idefics3":  # padded to the most pictures of any row
                pictures_of_rows, padding = picked[key].tensor_split([value.size(1)], dim=1)
                assert torch.equal(pictures_of_rows, value) and not padding.any()
            else:
                assert torch.equal(picked[key], value)


@pytest.mark.parametrize("shapes", [True, False], ids=["LFM2-VL", "InternVL"])
def test_tiles_are_followed(shapes):
    """Rows of 1, 2 and 3 pictures, cut into 4, 2 and 7 tiles."""
    tiles = [4, 2, 7]
    batch = {"num_images": [1, 2, 3], "num_tiles": tiles, "pixel_values": torch.arange(13.0)[:, None]}
    if shapes:
        batch |= {"spatial_shapes": torch.arange(26).view(13, 2), "pixel_attention_mask": torch.arange(13)[:, None]}
    picked = pick_images(images_by_row(batch, 3), (2, 0))
    index = [*range(6, 13), *range(4)]
    assert picked["num_tiles"] == [7, 4] and picked["pixel_values"].flatten().tolist() == index
    for key in ("spatial_shapes", "pixel_attention_mask") if shapes else ():
        assert torch.equal(picked[key], batch[key][index])


def test_image_sizes_and_positions_are_followed():
    sizes = torch.arange(10).view(5, 2)
    batch = {"num_images": [2, 0, 3], "pixel_values": torch.arange(5.0)[:, None]}
    for key in ("image_sizes", "image_position_ids"):
        by_row = images_by_row(batch | {key: sizes}, 3)
        assert pick_images(by_row, (2,))[key].tolist() == sizes[2:].tolist()
        assert pick_images(by_row, (1, 0))[key].tolist() == sizes[:2].tolist()


def test_an_unknown_layout_is_refused_by_name():
    batch = {"num_images": [1, 2], "pixel_values": torch.zeros(7, 3)}
    with pytest.raises(ValueError, match=r"`pixel_values` has 7 entries for 2 rows with 3 images"):
        images_by_row(batch, 2)
    with pytest.raises(ValueError, match=r"`pixel_values` comes without `num_images`"):
        images_by_row({"pixel_values": torch.zeros(2, 3)}, 2)
    with pytest.raises(ValueError, match=r"`image_sizes` has 3 entries for 2 rows"):
        tiles = {"num_tiles": [1, 2], "pixel_values": torch.zeros(3, 3), "image_sizes": torch.zeros(3, 2)}
        images_by_row({"num_images": [1, 2]} | tiles, 2)


def test_rows_without_pictures_are_left_alone():
    batch = {"prompt_ids": torch.zeros(2, 3), "pixel_values": None, "num_images": None}
    assert images_by_row(batch, 2) == batch == join_images(batch)
    assert pick_images({}, (0,)) == {}
