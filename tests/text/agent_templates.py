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
