"""What requests may hold: types and ranges of every field, checked before anything else looks at them. Fields we do not
know are let be, as clients send many. What depends on this server's limits or model is checked in `sampling.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool

from twostroke.core.sampling_params import MAX_LOGPROBS, MAX_SAMPLES
from twostroke.core.speculation import MAX_DRAFTS

MAX_TOKEN_ID = 2**31 - 1
MAX_COUNT = 2**31 - 1
MAX_CHAT_LOGPROBS = 20
MAX_ENTRIES = 4096


def _sendable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds half of a surrogate pair at character {error.start}") from None
    return text


def _few(value: object) -> object:
    """Before its entries are looked at: a complaint for each of a million would take longer than the request."""
    if isinstance(value, dict | list) and len(value) > MAX_ENTRIES:
        raise ValueError(f"it has {len(value)} entries, and {MAX_ENTRIES} are allowed at most")
    return value


def _writable(value: object) -> object:
    """What an answer repeats must be such as can be sent: half a surrogate pair, however deep in it, cannot."""
    try:
        msgspec.json.encode(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be repeated in the answer: {error}"[:200]) from None
    return value


Item = TypeVar("Item")
Entry = TypeVar("Entry")

Text = Annotated[str, AfterValidator(_sendable)]
"""JSON can spell half a surrogate pair, which no text can hold."""
Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item ends the matter."""
Few = Annotated[list[Item], Field(fail_fast=True), BeforeValidator(_few)]
"""A short list whose first wrong item ends the matter: its items take their time to check."""
Table = Annotated[dict[Text, Entry], BeforeValidator(_few)]
Repeated = AfterValidator(_writable)
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Salt = Annotated[Text, Field(max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Body(BaseModel):
    """No "7" for 7 and no 1 for true: a client that confuses types is told, not guessed at."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_progress: bool = False
    """Chunks with `prefill_progress` while the prompt is read."""
    continuous_usage_stats: bool = False
    """Every chunk has the tokens so far."""


class StructuredOutputs(Body):
    """One of these: what the answer must look like, as vLLM names it."""

    json_schema: Text | Table[Any] | None = Field(None, alias="json", description="A JSON schema.")
    regex: Text | None = None
    choice: Many[Text] | None = None
    grammar: Text | None = Field(None, description="In Lark.")


class Speculation(Body):
    """Ours alone, so a field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: Text | None = Field(None, max_length=64, description="auto, off, or one that the server was started with.")
    max_drafts: int | None = Field(None, ge=0, le=MAX_DRAFTS, description="The most drafts a step; 0: none.")


LevelName = Annotated[Text, Field(max_length=64)]
Speculating = Annotated[Text, Field(max_length=64)] | Speculation | None
HandoffParams = Table[Any] | None


class DrawingBody(Body):
    """What all three share: how tokens are drawn, and how the answer is sent."""

    model: Text | None = Field(None, max_length=512)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT, description="-1 and 0: off.")
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: Table[Bias] | None = Field(None, description="By token id.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Text | Many[Text] | None = None
    stop_token_ids: Many[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_COUNT)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-1000, le=1000, description="Lower runs first.")
    cache_salt: Salt | None = Field(None, description="Only requests of the same salt share cached prefixes.")
    speculation: Speculating = Field(None, description="auto, off, a method's name, or method and max_drafts.")
    service_level: LevelName | None = Field(None, description="The class whose promise it is held to, by name.")
    service_tier: LevelName | None = Field(None, description="As service_level, where a class has that name.")
    kv_transfer_params: HandoffParams = Field(None, description="Between the servers of a fleet, by its router.")


class SamplingBody(DrawingBody):
    """What chat and plain completions share."""

    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    response_format: Table[Any] | None = Field(None, description="text, json_object or json_schema.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | Table[Any] | None = Field(None, description="As structured_outputs.json, and so the others.")
    guided_regex: Text | None = None
    guided_choice: Many[Text] | None = None
    guided_grammar: Text | None = None


class ContentPart(Body):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Text
    text: Text | None = None
    refusal: Text | None = None


class ChatMessage(Body):
    """Further fields (`name`, `tool_calls`, ...) reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Text = Field(max_length=64)
    content: Text | Few[ContentPart] | None = None


class ToolsBody(Body):
    """What changes the prompt that messages become."""

    tools: Few[Table[Any]] | None = None
    tool_choice: Text | Table[Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Table[Any] | None = Field(None, description="Variables for the model's chat template.")


class ChatBody(ToolsBody, SamplingBody):
    messages: Few[ChatMessage] = Field(min_length=1)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_CHAT_LOGPROBS)
    functions: Any = Field(None, description="Refused: use `tools`.")
    function_call: Any = Field(None, description="Refused: use `tool_choice`.")
    audio: Any = Field(None, description="Refused.")
    web_search_options: Any = Field(None, description="Refused.")


class CompletionBody(SamplingBody):
    prompt: Text | Many[Text] | Many[TokenId] | Many[Many[TokenId]]
    max_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="0 is for `echo` alone.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: Text | None = Field(None, description="What stands behind the hole that is to be filled.")
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES, description="As many are written, the n likeliest given.")


class InputItem(Body):
    """A message, a thought, a call or its result; other kinds of item are refused by name."""

    type: Text = Field("message", max_length=64)
    id: Text | None = Field(None, max_length=256)
    role: Text | None = Field(None, max_length=64)
    content: Text | Few[ContentPart] | None = None
    summary: Few[ContentPart] | None = None
    call_id: Text | None = Field(None, max_length=256)
    name: Text | None = Field(None, max_length=256)
    arguments: Text | None = None
    input: Text | None = None
    output: Text | Few[ContentPart] | None = None


class ResponsesBody(DrawingBody):
    input: Text | Few[InputItem]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    metadata: Table[Text] | None = Field(None, max_length=16)
    store: bool | None = Field(None, description="false: it is not kept.")
    tools: Annotated[Few[Table[Any]] | None, Repeated] = None
    tool_choice: Annotated[Text | Table[Any] | None, Repeated] = None
    parallel_tool_calls: bool | None = None
    text: Annotated[Table[Any] | None, Repeated] = None
    chat_template_kwargs: Table[Any] | None = Field(None, description="Variables for the model's chat template.")
    include: Many[Text] | None = Field(None, max_length=64, description="`message.output_text.logprobs`.")
    background: bool | None = Field(None, description="true is refused.")
    truncation: Text | None = Field(None, description="Only `disabled`.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_CHAT_LOGPROBS)
    n: int | None = Field(None, description="Only 1.")
    previous_response_id: Text | None = Field(None, max_length=256, description="The response to go on from.")
    conversation: Any = Field(None, description="Refused.")
    prompt: Any = Field(None, description="Refused.")
    max_tokens: Any = Field(None, description="Refused, as max_completion_tokens: use `max_output_tokens`.")
    max_completion_tokens: Any = None
    response_format: Any = Field(None, description="Refused, as those that follow: use `text.format`.")
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class TokenizeBody(ToolsBody):
    """Either `prompt` or `messages`, and with these whatever chat takes that changes the prompt."""

    model: Text | None = Field(None, max_length=512)
    prompt: Text | None = None
    messages: Few[ChatMessage] | None = None
    add_generation_prompt: bool = Field(True, description="Of a chat: the beginning of the answer, too.")
    add_special_tokens: bool = Field(True, description="Of a prompt: with what the tokenizer puts around it.")
    return_token_strs: bool | None = Field(None, description="The tokens as texts, too.")


class DetokenizeBody(Body):
    model: Text | None = Field(None, max_length=512)
    tokens: Many[TokenId]
    skip_special_tokens: bool = False


class VectorBody(Body):
    """What requests for vectors share."""

    model: Text | None = Field(None, max_length=512)
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="Texts are cut to this many tokens; -1: to what the model takes."
    )
    priority: int | None = Field(None, ge=-1000, le=1000, description="Lower runs first.")
    service_level: LevelName | None = Field(None, description="The class whose promise it is held to, by name.")
    service_tier: LevelName | None = Field(None, description="As service_level, where a class has that name.")


class EmbeddingBody(VectorBody):
    input: Text | Many[Text] | Many[TokenId] | Many[Many[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="This many of the first numbers, normalised anew."
    )
    prompt_name: Text | None = Field(None, max_length=256, description="Of the model's prompts; default: its own.")
    input_type: Text | None = Field(
        None, max_length=256, description="Cohere's, Voyage's and NIM's word for it: query, search_document and so on."
    )
    task: Text | None = Field(None, max_length=256, description="Jina's word for it: retrieval.query and so on.")
    normalized: bool | None = Field(None, description="Vectors of length 1; what is left out: as the model has them.")
    output_dimension: Count | None = Field(None, description="As dimensions.")
    embedding_type: Text | Few[Text] | None = Field(None, description="As encoding_format: float or base64.")
    output_dtype: Text | None = Field(None, description="float: no other is written.")
    late_chunking: bool | None = None
    return_multivector: bool | None = None


class TextDocument(Body):
    text: Text


class RerankBody(VectorBody):
    query: Text
    documents: Many[Text] | Few[Text | TextDocument]
    top_n: int | None = Field(None, ge=0, le=MAX_COUNT, description="This many of the best; 0 or none: all.")
    top_k: int | None = Field(None, ge=0, le=MAX_COUNT, description="As top_n.")
    return_documents: bool | None = Field(None, description="The texts, too; default: yes, but not of /v2/rerank.")
    max_tokens_per_doc: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="Documents are cut to this many; 0: not."
    )
    instruction: Text | None = Field(None, description="What a language model that ranks is to judge.")
