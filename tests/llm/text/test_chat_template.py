import json
from typing import Any

import pytest
import transformers

from fullstride.errors import ConfigError
from fullstride.llm.text import chat_template
from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.confined import IsolatedFunction
from fullstride.llm.text.tokenizer import Tokenizer
from tests.llm.tiny import TEMPLATE, make_tokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What Qwen3's template does: tools as JSON lines, thoughts cut from old answers, calls and their results in turns.
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- "Functions:" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<result>') %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('System message first!') }}{% endif %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {% generation %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n<call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson(indent=1) }}
            {{- '}\\n</call>' }}
        {%- endfor %}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<result>\\n' + content + '\\n</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{% endif %}
        {%- continue %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- bos_token + message.role + '\\n' + content }}
    {%- endif %}
    {{- eos_token ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
DATE = "{{ strftime_now('%Y') }} {{ messages | tojson(ensure_ascii=True, sort_keys=True) }} {{ documents is none }}"
TEMPLATES = {"tiny": TEMPLATE, "smollm2": SMOLLM2, "tools": TOOLS, "date": DATE}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of <a> city & its 'suburbs', e.g. Zürich",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2.5, None]}}}
TALKS = {
    "question": [{"role": "user", "content": "What is <b>2 & 2</b>?"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "東京 👩‍🚀?"}],
    "thoughts": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nThat is all", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "sun"},
    ],
}
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def _theirs(template: str, talk: list, **kwargs) -> str:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), chat_template=template, **SPECIAL)
    text = fast.apply_chat_template(talk, tokenize=False, **kwargs)
    assert isinstance(text, str)
    return text


def _ours(template: str, talk: list, **kwargs) -> str:
    return Tokenizer(make_tokenizer(), template=ChatTemplate(template, SPECIAL)).chat(talk, **kwargs)


def _without_calls(message: dict) -> dict:
    """Return what templates without a place for calls are given."""
    calls = [{key: each["function"][key] for key in ("name", "arguments")} for each in message.get("tool_calls", ())]
    lines = [message["content"], *(json.dumps(call, ensure_ascii=False) for call in calls)]
    return {"role": message["role"], "content": "\n".join(lines)}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER, WEATHER]], ids=["plain", "tools"])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_what_transformers_makes_of_it(template, talk, tools, prompt):
    args = (TEMPLATES[template], TALKS[talk])
    if tools and template != "tools":
        with pytest.raises(ConfigError, match="has no place for tools"):
            _ours(*args, tools=tools, add_generation_prompt=prompt)
        return
    ours = _ours(*args, tools=tools, add_generation_prompt=prompt)
    talk = TALKS[talk] if template in ("tools", "date") else [_without_calls(message) for message in TALKS[talk]]
    assert ours == _theirs(args[0], talk, tools=tools, add_generation_prompt=prompt)
    assert len(ours) > 20


def test_settings_reach_the_template():
    args = (TOOLS, TALKS["question"])
    quiet = _ours(*args, enable_thinking=False)
    assert quiet == _theirs(*args, add_generation_prompt=True, enable_thinking=False)
    assert quiet == _ours(*args) + "<think>\n\n</think>\n\n"


def test_tools_have_a_template_of_their_own_where_the_model_has_one():
    template = ChatTemplate("plain", {}, with_tools="{{ tools | length }} tools")
    assert template.render([], None, True) == template.render([], [], True) == "plain"
    assert template.render([], [WEATHER], True) == "1 tools"


def test_the_templates_own_refusal_reaches_the_user():
    with pytest.raises(ConfigError, match="refuses these messages: System message first!"):
        _ours(TOOLS, TALKS["system"][::-1])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ range(10**9) | list }}",
        "{{ messages[0].role.nothing.more }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(attack):
    with pytest.raises(ConfigError, match="refuses these messages"):
        _ours(attack, TALKS["question"])


def test_what_is_no_template():
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% for x in %}", {})
    with pytest.raises(ConfigError, match="has no chat template"):
        Tokenizer(make_tokenizer()).chat(TALKS["question"])


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
    "a product": "{{ messages[0].content * 10**10 }}",
    "a constant": "{{ 'a' * 10**11 }}",
    "a power": "{{ (10 ** (10 ** 8)) % messages[0].content|length }}",
    "centre": "{{ messages[0].content.center(10**11) }}",
    "a format": "{{ '%99999999999d' % messages[0].content|length }}",
    "JSON": "{{ messages | tojson(indent=10**10) }}",
    "a macro": "{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n else 'a' }}{% endmacro %}{{ f(60) }}",
    "a list": "{% set x = namespace(l=messages) %}{% for i in range(99) %}{% set x.l = x.l + x.l %}{% endfor %}",
    "indents": "{{ ('a\\n' * 99999) | indent(99999) }}",
    "output": "{% for i in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
}


@pytest.fixture(scope="module")
def hasty():
    """Confine templates, with less time for each."""
    return IsolatedFunction("fullstride.llm.text.rendering:renderer", seconds=0.2, memory=chat_template.MEMORY)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_would_take_all_time_or_memory_is_ended(text, hasty, monkeypatch):
    tried: list[object] = []
    monkeypatch.setattr(chat_template, "_rendered", lambda given: tried.append(given) or hasty(given))
    with pytest.raises(ConfigError, match="the (model's )?chat template .*: too costly: more ") as caught:
        ChatTemplate(text, {}).render([{"role": "user", "content": "hello"}], None, True)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    # Compiled, rendered once without and once with tools, and for the conversation.
    assert len(tried) <= 4 or "of computing" not in str(caught.value)
    # Others are served as ever.
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"content": "é"}], None, True) == "é"


# As GPT-OSS's template reads an assistant's message: one of content and thinking before calls.
CHANNELS = """{% for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}
{%- if message.content or message.thinking %}analysis:{{ message.content or message.thinking }};{% endif %}
{%- for call in message.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }};{% endfor %}
{%- elif message.role == 'assistant' %}
{%- if message.thinking %}analysis:{{ message.thinking }};{% endif %}final:{{ message.content }};
{%- else %}{{ message.role }}:{{ message.content }};{% endif %}{% endfor %}"""


def test_reasoning_is_given_to_a_template_that_calls_it_thinking():
    template, call = ChatTemplate(CHANNELS, {}), {"function": {"name": "f", "arguments": {"a": 1}}}
    asked = {"role": "user", "content": "Hi", "reasoning_content": "none of it"}
    thought: dict[str, Any] = {"role": "assistant", "reasoning_content": "T"}
    for answer, expected in (
        ({**thought, "content": "C"}, "analysis:T;final:C;"),
        ({**thought, "content": None, "tool_calls": [call]}, 'analysis:T;f{"a": 1};'),
        ({**thought, "content": "C", "tool_calls": [call]}, 'analysis:T\n\nC;f{"a": 1};'),
        ({"role": "assistant", "content": "C", "tool_calls": [call]}, 'analysis:C;f{"a": 1};'),
    ):
        assert template.render([asked, answer], None, True) == f"user:Hi;{expected}"
    other = ChatTemplate(CHANNELS + "{# reasoning_content #}", {})
    assert other.render([{**thought, "content": "C"}], None, True) == "final:C;"
