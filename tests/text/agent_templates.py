"""Templates of models that call tools and think, in the manner of each family: what they read of a message, what they
write, and what they refuse. In words of our own."""

from __future__ import annotations

GPT_OSS = """{{- "<|start|>system<|message|>Every message has a channel: analysis, commentary or final.<|end|>" }}
{%- set orders = "" %}{%- set turns = messages %}
{%- if messages[0].role in ("system", "developer") %}
    {%- set orders = messages[0].content %}{%- set turns = messages[1:] %}
{%- endif %}
{%- if orders or tools %}
    {{- "<|start|>developer<|message|>" + orders }}
    {%- if tools %}
        {{- "# Tools\\n\\nnamespace functions {\\n" }}
        {%- for tool in tools %}
            {{- "// " ~ (tool.function.description or "") ~ "\\ntype " + tool.function.name + " = (_: " }}
            {{- (tool.function.parameters or {}) | tojson + ") => any;\\n" }}
        {%- endfor %}
        {{- "}" }}
    {%- endif %}
    {{- "<|end|>" }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for turn in turns %}
    {%- if turn.role == "assistant" %}
        {%- if "content" in turn and "<|channel|>" in turn.content %}
            {{- raise_exception("A content has no channels.") }}
        {%- elif "thinking" in turn and "<|channel|>" in turn.thinking %}
            {{- raise_exception("A thought has no channels.") }}
        {%- endif %}
        {%- if "tool_calls" in turn %}
            {%- set later = namespace(has_answer=false) %}
            {%- for other in turns[loop.index:] if other.role == "assistant" and "tool_calls" not in other %}
                {%- set later.has_answer = true %}
            {%- endfor %}
            {%- if turn.content and turn.thinking %}
                {{- raise_exception("A call has a content or a thought, not both.") }}
            {%- endif %}
            {%- if (turn.thinking or turn.content) and not later.has_answer %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + (turn.thinking or turn.content) + "<|end|>" }}
            {%- endif %}
            {%- set call = turn.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson }}
            {{- "<|call|>" }}
            {%- set called.name = call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + turn.content + "<|end|>" }}
            {%- set called.name = none %}
        {%- endif %}
    {%- elif turn.role == "tool" %}
        {%- if called.name is none %}{{- raise_exception("Nothing was called before this result.") }}{%- endif %}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- turn.content | tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + turn.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""


_GEMMA4_VALUES = """{%- macro written(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ "true" if value else "false" }}
    {%- elif value is mapping -%}{{ "{" }}{{ entries(value) }}{{ "}" }}
    {%- elif value is sequence -%}[{% for one in value %}{{ written(one) }}{{ "," if not loop.last }}{% endfor %}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro entries(values) -%}
    {%- for key, value in values | dictsort -%}{{ key }}:{{ written(value) }}{{ "," if not loop.last }}{%- endfor -%}
{%- endmacro -%}
{{- bos_token }}
{%- set last = namespace(kind=none) %}{%- set turns = messages %}
{%- if tools or messages[0].role == "system" %}
    {{- "<|turn>system\\n" }}
    {%- if messages[0].role == "system" %}{{- messages[0].content | trim }}{%- set turns = messages[1:] %}{%- endif %}
    {%- for tool in tools or [] %}
        {%- set last.kind = 'tool' -%}
        {{- "<|tool>declaration:" + tool.function.name + "{" + entries(tool.function.parameters) + "}<tool|>" }}
    {%- endfor %}
    {{- "<turn|>\\n" }}
{%- endif %}
"""
_GEMMA4_RESULTS = """
    {%- for result in turn.tool_responses or [] %}
        {{- "<|tool_response>response:" + result["name"] | default("unknown") + "{" }}
        {{- entries(result["response"] if result["response"] is mapping else {"value": result["response"]}) }}
        {{- "}<tool_response|>" }}
        {%- set last.kind = "tool_response" %}
    {%- endfor %}
    {%- if turn.content is string %}{{- turn.content | trim }}{%- endif %}
    {%- if not (turn.tool_responses and not turn.content) %}{{- "<turn|>\\n" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if last.kind != "tool_response" %}{{- "<|turn>model\\n" }}{%- endif %}
    {%- if not enable_thinking | default(false) %}{{- "<|channel>thought\\n<channel|>" }}{%- endif %}
{%- endif %}"""
_GEMMA4_CALLS = """
    {%- for call in turn.tool_calls or [] %}
        {{- "<|tool_call>call:" + call.function.name + "{" + entries(call.function.arguments) + "}<tool_call|>" }}
        {%- set last.kind = "tool_call" %}
    {%- endfor %}"""
GEMMA4 = f"""{_GEMMA4_VALUES}{{%- for turn in turns %}}
    {{%- set last.kind = none %}}
    {{{{- "<|turn>" + ("model" if turn["role"] == "assistant" else turn["role"]) + "\\n" }}}}
    {_GEMMA4_CALLS}{_GEMMA4_RESULTS}"""
"""As it was first published: no thought is read again, and results are read from the message that called."""
GEMMA4_INTERLEAVED = f"""{_GEMMA4_VALUES}{{%- set user = namespace(last=-1) %}}
{{%- for turn in turns if turn["role"] == "user" %}}{{%- set user.last = turns.index(turn) %}}{{%- endfor %}}
{{%- for turn in turns %}}
    {{%- if not (last.kind == "tool_response" and turn.tool_calls) %}}
        {{{{- "<|turn>" + ("model" if turn["role"] == "assistant" else turn["role"]) + "\\n" }}}}
    {{%- endif %}}
    {{%- set last.kind = none %}}
    {{%- if turn.tool_calls and turn["reasoning_content"] and loop.index0 > user.last %}}
        {{{{- "<|channel>thought\\n" + turn["reasoning_content"] + "<channel|>" }}}}
    {{%- endif %}}{_GEMMA4_CALLS}{_GEMMA4_RESULTS}"""

_LAST_USER = """{%- set user = namespace(last=-1) %}
{%- for turn in messages %}{%- if turn.role == "user" %}{%- set user.last = loop.index0 %}{%- endif %}{%- endfor %}
"""
GLM46 = (
    """[gMASK]<sop>
{%- if tools %}{{- "<|system|>\\n<tools>\\n" }}
    {%- for tool in tools %}{{- tool | tojson(ensure_ascii=False) + "\\n" }}{%- endfor %}
    {{- "</tools>\\nCall as <tool_call>{name}\\n<arg_key>{key}</arg_key>\\n" }}
    {{- "<arg_value>{value}</arg_value>\\n</tool_call>" }}
{%- endif %}
"""
    + _LAST_USER
    + """{%- for turn in messages %}
    {%- if turn.role == "user" %}{{- "<|user|>\\n" + turn.content }}
    {%- elif turn.role == "system" %}{{- "<|system|>\\n" + turn.content }}
    {%- elif turn.role == "assistant" %}
        {{- "<|assistant|>\\n<think>" }}
        {%- if turn.reasoning_content is string and loop.index0 > user.last %}
            {{- turn.reasoning_content.strip() }}
        {%- endif %}
        {{- "</think>" }}
        {%- if turn.content.strip() %}{{- "\\n" + turn.content.strip() }}{%- endif %}
        {%- for call in turn.tool_calls or [] %}
            {{- "\\n<tool_call>" + call.function.name + "\\n" }}
            {%- for key, value in call.function.arguments.items() %}
                {{- "<arg_key>" + key + "</arg_key>\\n<arg_value>" }}
                {{- value if value is string else value | tojson(ensure_ascii=False) }}
                {{- "</arg_value>\\n" }}
            {%- endfor %}
            {{- "</tool_call>" }}
        {%- endfor %}
    {%- elif turn.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "<|observation|>" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + turn.content + "\\n</tool_response>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{%- endif %}"""
)
GLM47 = (
    """[gMASK]<sop>
{%- if tools %}{{- "<|system|><tools>" }}
    {%- for tool in tools %}{{- tool | tojson(ensure_ascii=False) }}{%- endfor %}
    {{- "</tools>Call as <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>" }}
{%- endif %}
"""
    + _LAST_USER
    + """{%- for turn in messages %}
    {%- if turn.role in ("user", "system") %}{{- "<|" + turn.role + "|>" + turn.content }}
    {%- elif turn.role == "assistant" %}
        {{- "<|assistant|>" }}
        {%- if turn.reasoning_content is string and loop.index0 > user.last %}
            {{- "<think>" + turn.reasoning_content.strip() }}
        {%- endif %}
        {{- "</think>" + turn.content.strip() }}
        {%- for call in turn.tool_calls or [] %}
            {{- "<tool_call>" + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- "<arg_key>" + key + "</arg_key><arg_value>" }}
                {{- value if value is string else value | tojson(ensure_ascii=False) }}
                {{- "</arg_value>" }}
            {%- endfor %}
            {{- "</tool_call>" }}
        {%- endfor %}
    {%- elif turn.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "<|observation|>" }}{%- endif %}
        {{- "<tool_response>" + turn.content + "</tool_response>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|><think>" }}{%- endif %}"""
)
KIMI_K2 = """{%- if tools %}{{- "<|im_system|>tool_declare<|im_middle|>" + tools | tojson + "<|im_end|>" }}{%- endif %}
{%- set answered = namespace(place=-1) %}
{%- for turn in messages %}
    {%- if turn["role"] == "assistant" and not turn.get("tool_calls") %}
        {%- set answered.place = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- set kind = turn["role"] if turn["role"] in ("user", "assistant") else "system" %}
    {{- "<|im_" + kind + "|>" + (turn.get("name") or turn["role"]) + "<|im_middle|>" }}
    {%- if turn["role"] == "assistant" %}
        {{- "<think>" }}
        {%- if loop.index0 > answered.place %}{{- turn.get("reasoning_content", "") }}{%- endif %}
        {{- "</think>" + turn["content"] }}
        {%- if turn.get("tool_calls") %}
            {{- "<|tool_calls_section_begin|>" }}
            {%- for call in turn["tool_calls"] %}
                {{- "<|tool_call_begin|>" + call["id"] + "<|tool_call_argument_begin|>" }}
                {{- call["function"]["arguments"] | tojson }}
                {{- "<|tool_call_end|>" }}
            {%- endfor %}
            {{- "<|tool_calls_section_end|>" }}
        {%- endif %}
    {%- elif turn["role"] == "tool" %}{{- "## Return of " + turn["tool_call_id"] + "\\n" + turn["content"] }}
    {%- else %}{{- turn["content"] }}{%- endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_assistant|>assistant<|im_middle|>" }}{%- endif %}"""
LFM25 = (
    """{{- bos_token }}
{%- macro value_of(value) -%}
    {%- if value is string -%}{{ "'" + value + "'" }}
    {%- elif value is mapping -%}{{ value | tojson }}
    {%- else -%}{{ value | string }}{%- endif -%}
{%- endmacro -%}
{%- if tools %}{{- "<|im_start|>system\\nList of tools: " + tools | tojson + "<|im_end|>\\n" }}{%- endif %}
"""
    + _LAST_USER
    + """{%- for turn in messages %}
    {{- "<|im_start|>" + turn.role + "\\n" }}
    {%- if turn.role == "assistant" %}
        {%- if turn.thinking is defined and loop.index0 > user.last %}
            {{- "<think>" + turn.thinking + "</think>" }}
        {%- endif %}
        {{- turn.content }}
        {%- if turn.tool_calls is defined %}
            {%- set row = namespace(calls=[]) %}
            {%- for call in turn.tool_calls %}
                {%- set list = namespace(values=[]) %}
                {%- for key, value in call["function"]["arguments"].items() %}
                    {%- set list.values = list.values + [key + "=" + value_of(value)] %}
                {%- endfor %}
                {%- set row.calls = row.calls + [call["function"]["name"] + "(" + list.values | join(", ") + ")"] %}
            {%- endfor %}
            {{- "<|tool_call_start|>[" + row.calls | join(", ") + "]<|tool_call_end|>" }}
        {%- endif %}
    {%- else %}{{- turn.content }}{%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
)
NEMOTRON3 = (
    """{%- if tools %}{{- "<|im_start|>system\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + tool.function | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nCall as <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>" }}
    {{- "\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
"""
    + _LAST_USER
    + """{%- for turn in messages %}
    {%- if turn.role == "assistant" %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if turn.reasoning_content is string and loop.index0 > user.last %}
            {{- "<think>\\n" ~ turn.reasoning_content ~ "\\n</think>\\n" }}
        {%- else %}{{- "<think></think>" }}{%- endif %}
        {{- turn.content | default("", true) | trim }}
        {%- if turn.tool_calls %}
            {{- "\\n" }}
            {%- for call in turn.tool_calls %}
                {{- "<tool_call>\\n<function=" ~ call.function.name ~ ">\\n" }}
                {%- for key, value in call.function.arguments | items %}
                    {%- set is_plain = value is string or not (value is mapping or value is sequence) %}
                    {{- "<parameter=" ~ key ~ ">\\n" ~ (value | string if is_plain else value | tojson) }}
                    {{- "\\n</parameter>\\n" }}
                {%- endfor %}
                {{- "</function>\\n</tool_call>\\n" }}
            {%- endfor %}
        {%- endif %}
        {{- "<|im_end|>\\n" }}
    {%- elif turn.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{- "<|im_start|>user\\n" }}{%- endif %}
        {{- "<tool_response>\\n" + turn.content + "\\n</tool_response>\\n" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- else %}{{- "<|im_start|>" + turn.role + "\\n" + turn.content + "<|im_end|>\\n" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n<think>\\n" }}{%- endif %}"""
)
NEMOTRON2 = """{%- if tools %}{{- "<SPECIAL_10>System\\n<AVAILABLE_TOOLS>[" }}
    {%- for tool in tools %}{{- tool.function | tojson + (", " if not loop.last else "") }}{%- endfor %}
    {{- "]</AVAILABLE_TOOLS>\\nCall as <TOOLCALL>[{...}]</TOOLCALL>\\n\\n" }}
{%- endif %}
{%- for turn in messages %}
    {%- if turn.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "<SPECIAL_11>User\\n<TOOL_RESPONSE>[" }}{%- endif %}
        {{- turn.content }}
        {%- set has_more = not loop.last and messages[loop.index0 + 1].role == "tool" %}
        {{- ", " if has_more else "]</TOOL_RESPONSE>\\n\\n" }}
    {%- elif turn.role == "assistant" %}
        {%- set said = turn.content.split("</think>")[-1].strip() %}
        {{- "<SPECIAL_11>Assistant\\n" + said }}
        {%- if turn.tool_calls %}
            {{- "\\n\\n" if said else "" }}{{- "<TOOLCALL>[" }}
            {%- for call in turn.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
                {{- "}" + (", " if not loop.last else "") }}
            {%- endfor %}
            {{- "]</TOOLCALL>" }}
        {%- endif %}
        {{- "\\n<SPECIAL_12>\\n\\n" }}
    {%- else %}{{- "<SPECIAL_11>" + turn.role | title + "\\n" + turn.content.strip() + "\\n" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<SPECIAL_11>Assistant\\n" }}{%- endif %}"""
GRANITE4 = """{%- if tools %}{{- "<|start_of_role|>system<|end_of_role|><tools>" }}
    {%- for tool in tools %}{{- "\\n" + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|end_of_text|>\\n' }}
{%- endif %}
{%- for turn in messages %}
    {%- set said = turn.content if turn.content is string else "" %}
    {%- if turn.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "<|start_of_role|>user<|end_of_role|>" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + said + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|end_of_text|>\\n" }}{%- endif %}
    {%- else %}
        {{- "<|start_of_role|>" + turn.role + "<|end_of_role|>" + said }}
        {%- for call in turn.tool_calls or [] %}
            {{- "\\n" if said or not loop.first else "" }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|end_of_text|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_of_role|>assistant<|end_of_role|>" }}{%- endif %}"""
MINIMAX_M2 = (
    _LAST_USER
    + """{{- "]~!b[]~b]system\\n" }}
{%- if tools %}{{- "<tools>\\n" }}
    {%- for tool in tools %}{{- "<tool>" + tool.function | tojson + "</tool>\\n" }}{%- endfor %}
    {{- "</tools>\\n<minimax:tool_call>\\n<invoke name=...>\\n</invoke>\\n</minimax:tool_call>" }}
{%- endif %}
{{- "[e~[\\n" }}
{%- for turn in messages %}
    {%- if turn.role == "assistant" %}
        {{- "]~b]ai\\n" }}
        {%- if turn.reasoning_content is string and loop.index0 > user.last %}
            {{- "<think>\\n" ~ turn.reasoning_content ~ "\\n</think>\\n\\n" }}
        {%- endif %}
        {{- turn.content }}
        {%- if turn.tool_calls %}
            {{- "\\n<minimax:tool_call>\\n" }}
            {%- for call in turn.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for key, value in call.function.arguments | items %}
                    {{- '<parameter name="' + key + '">' }}
                    {{- value if value is string else value | tojson }}
                    {{- "</parameter>\\n" }}
                {%- endfor %}
                {{- "</invoke>\\n" }}
            {%- endfor %}
            {{- "</minimax:tool_call>" }}
        {%- endif %}
        {{- "[e~[\\n" }}
    {%- elif turn.role == "tool" %}
        {%- if messages[loop.index0 - 1].role != "tool" %}{{- "]~b]tool" }}{%- endif %}
        {{- "\\n<response>" + turn.content + "</response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "[e~[\\n" }}{%- endif %}
    {%- else %}{{- "]~b]" + turn.role + "\\n" + turn.content + "[e~[\\n" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "]~b]ai\\n<think>\\n" }}{%- endif %}"""
)
