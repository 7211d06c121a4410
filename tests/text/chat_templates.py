"""A chat template in the manner of each family, with what real ones do to texts: JSON of tools, slices, splits, tests
for what a text holds, macros, namespaces, formats; and the control tokens that each is about."""

from __future__ import annotations

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and
        not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role }}
        {%- if reasoning_content %}
            {{- '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '\\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message ~ "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
        {{- header + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- "<|python_tag|>" + tool_call.name + ".call(" }}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' + arg_val | string + '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- ")" }}{{- "<|eom_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user, assistant and tool roles are supported") }}{%- endif %}
{%- endfor %}"""

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}"""

PHI = """{% for message in messages %}{% if message['role'] == 'system' and tools is not none %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + (tools | tojson) + '<|/tool|>' + '<|end|>' }}\
{% else %}{{ '<|{}|>'.format(message['role']) + (message['content'] or '') + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{%- set ns = namespace(system_prompt='', out='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
    {%- set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}
{%- endif %}{%- endfor %}
{%- set ns.out = bos_token ~ ns.system_prompt %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.out = ns.out + '<｜User｜>' + message['content'] %}{%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {%- set ns.out = ns.out + '<｜Assistant｜>' %}
        {%- for tool in message['tool_calls'] %}
            {%- set ns.out = ns.out + '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' +
                tool['function']['name'] +
                '\\n```json\\n' + tool['function']['arguments'] | string + '\\n```<｜tool▁call▁end｜>' %}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {%- set ns.out = ns.out + '<｜Assistant｜>' + content + eos_token %}
    {%- elif message['role'] == 'tool' %}
        {%- set ns.out = ns.out ~ '<｜tool▁output▁begin｜>' ~ message['content'] ~ '<｜tool▁output▁end｜>' %}
    {%- endif %}
{%- endfor %}
{{- ns.out.strip() }}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

MACROS = """{%- macro turn(role, text) -%}<|im_start|>{{ role | title | lower }}
{{ text | replace('\\r', '') | upper | lower }}<|im_end|>{%- endmacro %}
{%- set lines = [] %}
{%- for message in messages %}
    {%- set said = "%s (%s)" | format(message.content or '', message.name or 'nobody') %}
    {%- set part %}{{ turn(message.role, said) }}{% endset %}
    {%- set lines = lines + [part] %}{{- [part, '', part[:0]] | join('') ~ '\\n' }}
{%- endfor %}
{%- for key, value in (documents or [{}])[0] | dictsort %}{{- '[%s] %s' % (key, value) }}{%- endfor %}
{%- for tool in tools or [] %}{{- tool }}{{- tool.function.name.split('.') | join('/') }}{%- endfor %}
{%- filter trim %}  {{ '<|im_end|>' * 2 }}{{ style or '' }}  {% endfilter %}
{%- macro framed() -%}<|im_start|>{{ caller() }}{%- endmacro %}
{%- call framed() %}system{{ style }}<|im_end|>{% endcall %}{{- ' <|im_start|>assistant\\n'.lstrip() }}"""

TEMPLATES = {
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "chatml": CHATML,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "macros": MACROS,
}
BOS, EOS = "<s>", "</s>"
SPECIAL_TOKENS = [
    *(BOS, EOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|python_tag|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|tool|>", "<|/tool|>", "<|end|>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
