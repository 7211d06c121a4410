"""Further templates of models that call tools: DeepSeek V3.1's, Ministral 3's (and Mistral Small 4's), Qwen3.5's and
LFM2's. In words of our own, and some details from memory."""

from __future__ import annotations

DEEPSEEK_V31 = """{{- bos_token }}
{%- set at = namespace(user=false, result=false) %}
{%- for turn in messages if turn.role == "system" %}{{- turn.content }}{%- endfor %}
{%- if tools %}{{- "\\n\\n## Tools\\n" }}
    {%- for tool in tools %}
        {{- "\\n### " + tool.function.name + "\\nParameters: " + tool.function.parameters | tojson + "\\n" }}
    {%- endfor %}
    {{- "\\nCall as <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{}<｜tool▁call▁end｜>" }}
    {{- "<｜tool▁calls▁end｜>\\n" }}
{%- endif %}
{%- for turn in messages %}
    {%- if turn.role == "user" %}
        {{- "<｜User｜>" + turn.content }}{%- set at.user = true %}{%- set at.result = false %}
    {%- elif turn.role == "assistant" %}
        {%- if at.user %}{{- "<｜Assistant｜></think>" }}{%- endif %}
        {%- set at.user = false %}
        {%- if turn["tool_calls"] is defined and turn["tool_calls"] is not none %}
            {%- if turn["content"] is not none %}{{- turn["content"] }}{%- endif %}
            {{- "<｜tool▁calls▁begin｜>" }}
            {%- for call in turn["tool_calls"] %}
                {{- "<｜tool▁call▁begin｜>" + call["function"]["name"] + "<｜tool▁sep｜>" }}
                {{- "" + call["function"]["arguments"] + "<｜tool▁call▁end｜>" }}
            {%- endfor %}
            {{- "<｜tool▁calls▁end｜>" }}
        {%- else %}{{- turn["content"].split("</think>")[-1] }}{%- endif %}
        {{- "<｜end▁of▁sentence｜>" }}{%- set at.result = false %}
    {%- elif turn.role == "tool" %}
        {{- "<｜tool▁output▁begin｜>" + turn["content"] + "<｜tool▁output▁end｜>" }}
        {%- set at.user = false %}{%- set at.result = true %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and at.user and not at.result %}
    {{- "<｜Assistant｜>" + ("<think>" if thinking | default(false) else "</think>") }}
{%- endif %}"""
MINISTRAL3 = """{{- bos_token }}
{%- set turns = messages %}
{%- if messages[0]["role"] == "system" %}
    {{- "[SYSTEM_PROMPT]" + messages[0]["content"] + "[/SYSTEM_PROMPT]" }}{%- set turns = messages[1:] %}
{%- endif %}
{%- if tools %}{{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- set count = namespace(turns=0) %}
{%- for turn in turns %}
    {%- if turn["role"] == "user" or (turn["role"] == "assistant" and not turn["tool_calls"]) %}
        {%- if (turn["role"] == "user") != (count.turns % 2 == 0) %}
            {{- raise_exception("Users and assistants speak in turns.") }}
        {%- endif %}
        {%- set count.turns = count.turns + 1 %}
    {%- endif %}
{%- endfor %}
{%- for turn in turns %}
    {%- if turn["role"] == "user" %}{{- "[INST]" + turn["content"] + "[/INST]" }}
    {%- elif turn["role"] == "assistant" %}
        {%- if turn["content"] is string %}{{- turn["content"] }}
        {%- elif turn["content"] is iterable %}
            {%- for part in turn["content"] %}
                {{- "[THINK]" + part["thinking"] + "[/THINK]" if part["type"] == "thinking" else part["text"] }}
            {%- endfor %}
        {%- endif %}
        {%- for call in turn["tool_calls"] or [] %}
            {%- set arguments = call["function"]["arguments"] %}
            {%- if arguments is not string %}{%- set arguments = arguments | tojson %}{%- endif %}
            {{- "[TOOL_CALLS]" + call["function"]["name"] + "[ARGS]" + (arguments or "{}") }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif turn["role"] == "tool" %}{{- "[TOOL_RESULTS]" + turn["content"] | string + "[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("There is no role " + turn["role"]) }}{%- endif %}
{%- endfor %}"""
QWEN3_5 = """{%- if tools %}{{- "<|im_start|>system\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\nCall as <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>" }}
    {{- "\\n</tool_call>" }}
    {%- if messages[0].role == "system" %}{{- "\\n\\n" + messages[0].content | trim }}{%- endif %}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == "system" %}{{- "<|im_start|>system\\n" + messages[0].content | trim + "<|im_end|>\\n" }}
{%- endif %}
{%- set asked = namespace(last=-1) %}
{%- for turn in messages %}
    {%- if turn.role == "user" and not turn.content.startswith("<tool_response>") %}
        {%- set asked.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if asked.last < 0 %}{{- raise_exception("Nobody asked anything.") }}{%- endif %}
{%- for turn in messages %}
    {%- set said = turn.content | default("", true) | trim %}
    {%- if turn.role == "system" %}
        {%- if not loop.first %}{{- raise_exception("The system speaks first.") }}{%- endif %}
    {%- elif turn.role == "user" %}{{- "<|im_start|>user\\n" + said + "<|im_end|>\\n" }}
    {%- elif turn.role == "assistant" %}
        {%- set thought = turn.reasoning_content if turn.reasoning_content is string else "" %}
        {%- if not thought and "</think>" in said %}
            {%- set thought = said.split("</think>")[0].split("<think>")[-1] %}
            {%- set said = said.split("</think>")[-1].lstrip("\\n") %}
        {%- endif %}
        {{- "<|im_start|>assistant\\n" }}
        {%- if loop.index0 > asked.last %}{{- "<think>\\n" + thought | trim + "\\n</think>\\n\\n" }}{%- endif %}
        {{- said }}
        {%- for call in turn.tool_calls or [] %}
            {{- ("\\n\\n" if said else "") if loop.first else "\\n" }}
            {{- "<tool_call>\\n<function=" + call.function.name + ">\\n" }}
            {%- for key, value in call.function.arguments | items %}
                {%- set is_plain = value is string or not (value is mapping or value is sequence) %}
                {{- "<parameter=" + key + ">\\n" + (value | string if is_plain else value | tojson) }}
                {{- "\\n</parameter>\\n" }}
            {%- endfor %}
            {{- "</function>\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif turn.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{- "<|im_start|>user" }}{%- endif %}
        {{- "\\n<tool_response>\\n" + said + "\\n</tool_response>" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- "<|im_end|>\\n" }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {{- "<think>\\n" if enable_thinking | default(true) else "<think>\\n\\n</think>\\n\\n" }}
{%- endif %}"""
LFM2 = """{{- bos_token }}
{%- set told = namespace(system="") %}{%- set turns = messages %}
{%- if messages[0]["role"] == "system" %}
    {%- set told.system = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- endif %}
{%- if tools %}
    {%- set told.system = told.system + ("\\n" if told.system else "") + "List of tools: <|tool_list_start|>" %}
    {%- set told.system = told.system + tools | tojson + "<|tool_list_end|>" %}
{%- endif %}
{%- if told.system %}{{- "<|im_start|>system\\n" + told.system + "<|im_end|>\\n" }}{%- endif %}
{%- for turn in turns %}
    {%- set said = turn["content"] if turn["content"] is string else turn["content"] | tojson %}
    {%- if turn["role"] == "tool" %}
        {%- set said = "<|tool_response_start|>" + said + "<|tool_response_end|>" %}
    {%- endif %}
    {{- "<|im_start|>" + turn["role"] + "\\n" + said + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""
"""It has no word for calls: they are part of what was said."""
