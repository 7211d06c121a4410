"""Language models that score a pair of texts by the answer they would give: the score of "yes" less that of "no",
behind a prompt that both texts stand in. Knows Qwen3-Reranker's prompt, and those that GGUF files carry."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from twostroke.core.errors import ModelError
from twostroke.core.vectors import PairFrame, VectorFacts
from twostroke.models.families.fields import Fields, shown
from twostroke.models.json_files import read_json, read_json_list
from twostroke.models.pooling import DenseStep, Pooling
from twostroke.models.weights.tensor import WeightTensor, from_float32

RERANKER = "qwen3-reranker"
"""In a model's name: its files are those of any Qwen3, and nothing in them says that it ranks."""
QWEN3_FRAME = PairFrame(
    head=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    before_query="<Instruct>: {instruction}\n<Query>: ",
    before_document="\n<Document>: ",
    tail="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
_ANSWERS = ("yes", "no")
_QUERY, _DOCUMENT = "{query}", "{document}"
_TURN = "user\n"
"""A rerank template's control tokens lie before this, and behind the document."""
_HEADS = ("lm_head.weight", "model.embed_tokens.weight", "embed_tokens.weight")


def is_reranker(folder: Path, name: str) -> bool:
    """By the name it was asked for by, or that of its folder or the repository it was fetched from."""
    return any(RERANKER in part.lower() for part in (name, *folder.resolve().parts[-3:]))


def logit_score_tokens(folder: Path, modules: str) -> tuple[int, int] | None:
    """The tokens that a folder of `sentence-transformers` compares; None: it compares none."""
    if not (folder / modules).is_file():
        return None
    entries = [entry for entry in read_json_list(folder / modules) if isinstance(entry, dict)]
    found = [entry for entry in entries if str(entry.get("type")).endswith(".LogitScore")]
    if not found:
        return None
    path = str(found[0].get("path", ""))
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise Fields(modules, found[0]).error("path", f"is {shown(path)}, which leaves the folder")
    fields = Fields(f"{path}/config.json", read_json(folder / path / "config.json"))
    tokens = fields.integer("true_token_id", 0, 2**31), fields.get("false_token_id")
    if tokens != answer_tokens(folder):
        raise fields.error(
            "true_token_id",
            f"and false_token_id are {shown(tokens)}; understood are those of {' and '.join(_ANSWERS)}, which "
            "Qwen3-Reranker compares",
        )
    return answer_tokens(folder)


def answer_tokens(folder: Path) -> tuple[int, int]:
    """Of yes and of no."""
    model = read_json(folder / "tokenizer.json").get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    yes, no = (vocabulary.get(word) if isinstance(vocabulary, dict) else None for word in _ANSWERS)
    if not isinstance(yes, int) or not isinstance(no, int):
        raise ModelError(f"{folder / 'tokenizer.json'} has no tokens for {' and '.join(_ANSWERS)}: no reranker's")
    return yes, no


def pooling_by_answer(source: str, tokens: tuple[int, int], stored: Mapping[str, WeightTensor]) -> Pooling:
    """`stored`: by their names in the folder."""
    head = next((stored[name] for name in _HEADS if name in stored), None)
    if head is None or len(head.shape) != 2 or max(tokens) >= head.shape[0]:
        raise ModelError(f"{source} has no output matrix with rows for the tokens {tokens[0]} and {tokens[1]}")
    rows = head.take_rows(np.array(tokens))
    return _pooling(rows, QWEN3_FRAME)


def pooling_by_score(source: str, stored: Mapping[str, WeightTensor]) -> Pooling:
    """Of a reranker that was saved as a classifier with one label."""
    weight = stored.get("score.weight")
    if weight is None or len(weight.shape) != 2 or weight.shape[0] != 1:
        raise ModelError(f"{source}: score.weight is missing, or has more than the one label of a reranker")
    return Pooling("last", VectorFacts(1, scores=True, frame=QWEN3_FRAME), (DenseStep(weight),))


def pooling_of_rank_file(fields: Fields, metadata: Mapping[str, object], stored: Mapping[str, WeightTensor]) -> Pooling:
    """Of a GGUF file whose `pooling_type` is that of rerankers."""
    labels, weight = fields.get("classifier.output_labels"), stored.get("cls.output.weight")
    if labels != list(_ANSWERS) or weight is None or len(weight.shape) != 2 or weight.shape[0] != len(_ANSWERS):
        raise fields.error("pooling_type", "is 4: of rerankers in GGUF files those alone are read that say yes or no")
    template = metadata.get("tokenizer.chat_template.rerank")
    return _pooling(weight, QWEN3_FRAME if template is None else _frame(fields, str(template)))


def _pooling(rows: WeightTensor, frame: PairFrame) -> Pooling:
    """`rows`: of yes and of no  # [2, hidden]"""
    yes, no = rows.to_float32()
    difference = from_float32("answer", np.ascontiguousarray(yes - no)[None])
    return Pooling("last", VectorFacts(1, scores=True, frame=frame), (DenseStep(difference),))


def _frame(fields: Fields, template: str) -> PairFrame:
    before, found_query, rest = template.partition(_QUERY)
    between, found_document, tail = rest.partition(_DOCUMENT)
    if not (found_query and found_document):
        raise fields.error("tokenizer.chat_template.rerank", f"does not hold {_QUERY} and then {_DOCUMENT}")
    head, turn, opening = before.rpartition(_TURN)
    return PairFrame(head + turn, opening, between, tail)
