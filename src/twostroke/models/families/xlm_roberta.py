"""RoBERTa and XLM-RoBERTa: BERT's encoder, whose first positions stand behind the padding's."""

from __future__ import annotations

from twostroke.models.families.bert import ENCODER_NAMES, encoder_spec
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec, StepActivation

_SCORES: tuple[tuple[str, StepActivation], ...] = (("classifier.dense", "tanh"), ("classifier.out_proj", "identity"))


def _family(name: str, stem: str) -> Family:
    def from_config(config: Fields) -> ModelSpec:
        config = config.over({"layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 1})
        return encoder_spec(config, name, first_position=config.integer("pad_token_id", 0, 2**20) + 1)

    scoring = f"{stem}ForSequenceClassification"
    return Family(
        name,
        (f"{stem}Model", f"{stem}ForMaskedLM", scoring),
        (),
        from_config,
        hf_names=ENCODER_NAMES,
        classifiers={scoring: _SCORES},
    )


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
