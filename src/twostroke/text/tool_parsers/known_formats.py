"""The formats that are known, each as data. Of several that a template's signs fit, the first is taken."""

from __future__ import annotations

from twostroke.text import harmony
from twostroke.text.tool_parsers.formats import ToolFormat
from twostroke.text.tool_parsers.xml_arguments import Tags

HERMES = ToolFormat(name="hermes", opening="<tool_call>\n", closing="\n</tool_call>", separator="\n")
"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM, Granite 4, EXAONE 4, ERNIE 4.5 and
most others."""
LLAMA3 = ToolFormat(
    name="llama3",
    wrapper=("<|python_tag|>", ""),
    arguments_key="parameters",
    skips=";",
    begins_bare=True,
    max_calls=1,
    families=("llama",),
)
"""`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`."""
LLAMA4 = ToolFormat(
    name="llama4",
    wrapper=("<|python_start|>", "<|python_end|>"),
    arguments_key="parameters",
    skips=";",
    begins_bare=True,
    max_calls=1,
    signs=("<|header_start|>", '"parameters": '),
    families=("llama4",),
)
"""The same between `<|python_start|>` and `<|python_end|>`, or bare."""
PYTHONIC = ToolFormat(
    name="pythonic",
    wrapper=("<|python_start|>", "<|python_end|>"),
    is_list=True,
    begins_bare=True,
    after_name="(",
    arguments="python",
    signs=("[func_name1(",),
)
"""`[name(city="Paris", days=2), other()]` as the whole answer: Llama 3.2 and 4 where their prompt asks for it."""
LFM2 = ToolFormat(
    name="lfm2",
    wrapper=("<|tool_call_start|>", "<|tool_call_end|>"),
    is_list=True,
    after_name="(",
    arguments="python",
    signs=("<|tool_call_start|>",),
    families=("lfm2", "lfm2_moe"),
)
"""`<|tool_call_start|>[name(city="Paris")]<|tool_call_end|>`."""
OLMO3 = ToolFormat(
    name="olmo3",
    wrapper=("<function_calls>\n", "\n</function_calls>"),
    separator="\n",
    after_name="(",
    arguments="python",
    families=("olmo3",),
    signs=("<function_calls>",),
)
"""`<function_calls>name(city="Paris")</function_calls>`, a line for each call."""

MISTRAL = ToolFormat(name="mistral", wrapper=("[TOOL_CALLS]", ""), is_list=True, has_short_ids=True)
"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`: Mistral's up to Small 3.1."""
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    opening="[TOOL_CALLS]",
    after_name="[ARGS]",
    has_short_ids=True,
    families=("mistral3", "ministral3", "mistral4"),
)
"""`[TOOL_CALLS]name[ARGS]{...}`, each call with its own marker, some with `[CALL_ID]...` behind the name: its later."""
NEMOTRON = ToolFormat(name="nemotron", wrapper=("<TOOLCALL>", "</TOOLCALL>"), is_list=True, signs=("<TOOLCALL>",))
"""`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron Nano 2, Llama Nemotron."""
GRANITE = ToolFormat(name="granite", wrapper=("<|tool_call|>", ""), is_list=True, families=("granite", "granitemoe"))
"""`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""
PHI4 = ToolFormat(
    name="phi4",
    wrapper=("<|tool_call|>", "<|/tool_call|>"),
    is_list=True,
    signs=("<|tool_call|>", "<|/tool_call|>"),
)
"""The same with an end: Phi 4 mini."""
HUNYUAN_LIST = ToolFormat(
    name="hunyuan-list", wrapper=("<tool_calls>", "</tool_calls>"), is_list=True, signs=("<tool_calls>[",)
)
"""`<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`: Hunyuan A13B."""

HARMONY = ToolFormat(
    name="harmony",
    opening=harmony.CALL_OPENING,
    after_name=harmony.CALL_AFTER_NAME,
    max_calls=1,
    signs=harmony.SIGNS,
    preface=harmony.THOUGHT,
    answer_opening=harmony.ANSWER_OPENING,
    families=("gpt_oss",),
)
"""`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}`, a message of its own: gpt-oss."""
DEEPSEEK_V3 = ToolFormat(
    name="deepseek-v3",
    wrapper=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n",
    closing="\n```<｜tool▁call▁end｜>",
    separator="\n",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    ends_thought=True,
)
"""`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then the arguments as a block of JSON: DeepSeek V3 and R1."""
DEEPSEEK_V31 = ToolFormat(
    name="deepseek-v31",
    wrapper=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    opening="<｜tool▁call▁begin｜>",
    after_name="<｜tool▁sep｜>",
    closing="<｜tool▁call▁end｜>",
    signs=("<｜tool▁calls▁begin｜>",),
    families=("deepseek_v3",),
    ends_thought=True,
)
"""`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`: DeepSeek V3.1."""
KIMI_K2 = ToolFormat(
    name="kimi-k2",
    wrapper=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    opening="<|tool_call_begin|>",
    after_name="<|tool_call_argument_begin|>",
    closing="<|tool_call_end|>",
    is_numbered=True,
    signs=("<|tool_calls_section_begin|>",),
    families=("kimi_k2",),
    ends_thought=True,
)
"""`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2."""
HUNYUAN = ToolFormat(
    name="hunyuan",
    wrapper=("<tool_calls>", "</tool_calls>"),
    opening="<tool_call>",
    after_name="\n```json\n",
    closing="\n```</tool_call>",
    signs=("<tool_calls>", "```json"),
    families=("hunyuan_v1_dense", "hunyuan_v1_moe"),
)
"""`<tool_calls><tool_call>name`, then the arguments as a block of JSON: Hunyuan's small ones."""

GEMMA4 = ToolFormat(
    name="gemma4",
    opening="<|tool_call>call:",
    after_name="{",
    closing="<tool_call|>",
    arguments="gemma",
    signs=("<|tool_call>", "<tool_call|>"),
)
"""`<|tool_call>call:name{city:<|"|>Paris<|"|>}<tool_call|>`: Gemma 4."""
FUNCTION_GEMMA = ToolFormat(
    name="function-gemma",
    opening="<start_function_call>call:",
    after_name="{",
    closing="<end_function_call>",
    arguments="gemma",
    quote="<escape>",
    signs=("<start_function_call>", "<escape>"),
)
"""`<start_function_call>call:name{city:<escape>Paris<escape>}<end_function_call>`: FunctionGemma."""
MINIMAX = ToolFormat(
    name="minimax",
    wrapper=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    opening='<invoke name="',
    after_name='">\n',
    separator="\n",
    arguments="xml",
    tags=Tags('<parameter name="', '">', "</parameter>", "</invoke>"),
    signs=("<minimax:tool_call>", "</minimax:tool_call>"),
    families=("minimax_m2",),
)
"""`<minimax:tool_call>`, then for each call `<invoke name="...">` and a `<parameter name="...">` each: MiniMax M2."""
QWEN3_CODER = ToolFormat(
    name="qwen3-coder",
    wrapper=("<tool_call>\n", "\n</tool_call>"),
    wraps_each=True,
    opening="<function=",
    after_name=">\n",
    separator="\n",
    arguments="xml",
    tags=Tags("<parameter=", ">", "</parameter>", "</function>", padding="\n"),
    signs=("<tool_call>", "<function=", "<parameter="),
    families=("qwen3_5", "qwen3_5_moe"),
)
"""`<tool_call><function=name><parameter=city>Paris</parameter></function></tool_call>`, tags on lines of their own:
Qwen3-Coder, Qwen3.5, Nemotron 3."""
SEED_OSS = ToolFormat(
    name="seed-oss",
    wrapper=("<seed:tool_call>\n", "\n</seed:tool_call>"),
    wraps_each=True,
    opening="<function=",
    after_name=">\n",
    separator="\n",
    arguments="xml",
    tags=Tags("<parameter=", ">", "</parameter>", "</function>"),
    signs=("<seed:tool_call>",),
    families=("seed_oss",),
)
"""`<seed:tool_call><function=name><parameter=city>Paris</parameter></function></seed:tool_call>`."""
GLM45 = ToolFormat(
    name="glm45",
    opening="<tool_call>",
    after_name="\n",
    separator="\n",
    is_named_by_line=True,
    arguments="xml",
    tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    families=("glm4_moe",),
)
"""`<tool_call>name`, then `<arg_key>city</arg_key><arg_value>Paris</arg_value>` on lines of their own: GLM 4.5, 4.6."""
GLM47 = ToolFormat(
    name="glm47",
    opening="<tool_call>",
    is_named_by_line=True,
    arguments="xml",
    tags=Tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>", separator=""),
    signs=("<tool_call>", "}<arg_key>", "<arg_value>"),
    families=("glm4_moe_lite",),
)
"""The same without white space: GLM 4.7."""
HUNYUAN3 = ToolFormat(
    name="hunyuan3",
    wrapper=("<tool_calls>\n", "\n</tool_calls>"),
    opening="<tool_call>",
    after_name="<tool_sep>\n",
    separator="\n",
    arguments="xml",
    tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
    signs=("<tool_calls>", "<tool_sep>", "<arg_key>"),
)
"""`<tool_calls><tool_call>name<tool_sep>`, then keys and values as GLM's: Hunyuan 3."""

FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        *(HARMONY, GEMMA4, FUNCTION_GEMMA, MINIMAX, KIMI_K2, DEEPSEEK_V3, DEEPSEEK_V31, SEED_OSS),
        *(HUNYUAN3, GLM47, GLM45, HUNYUAN_LIST, HUNYUAN, QWEN3_CODER, LFM2, NEMOTRON, OLMO3, PHI4, GRANITE, PYTHONIC),
        *(HERMES, LLAMA3, LLAMA4, MISTRAL_ARGS, MISTRAL),
    )
}
OTHER_NAMES = {
    "deepseek-r1": DEEPSEEK_V3,
    "ernie45": HERMES,
    "exaone4": HERMES,
    "granite4": HERMES,
    "hunyuan-a13b": HUNYUAN_LIST,
    "hy-v3": HUNYUAN3,
    "llama3-json": LLAMA3,
    "llama4-json": LLAMA4,
    "llama4-pythonic": PYTHONIC,
    "minimax-m2": MINIMAX,
    "openai": HARMONY,
    "qwen3-xml": QWEN3_CODER,
}
"""What the same are called elsewhere."""
