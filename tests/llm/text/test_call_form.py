import json
import random

import pytest
import transformers

from fullstride.errors import ConfigError
from fullstride.llm.text.chat_template import ChatTemplate
from fullstride.llm.text.messages import plain_messages
from tests.llm.tiny import make_tokenizer

# What DeepSeek-R1-Distill's first template does: calls beside null alone, arguments joined as text.
FIRST = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '<U>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
    {%- for call in m['tool_calls'] %}
    {{- '<A><call>' + call['type'] + '<sep>' + call['function']['name'] + '\\n```json\\n' }}
    {{- call['function']['arguments'] + '\\n```<end>' }}{% endfor %}
{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
    {{- '<A>' + m['content'].split('</think>')[-1] + '<eos>' }}
{%- endif %}
{%- if m['role'] == 'tool' %}{{ '<R>' + m['content'] }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}"""
# The next one: both may stand in a message.
SECOND = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '<U>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and 'tool_calls' in m %}
    {%- if m['content'] is none %}{{ '<A>' }}{% else %}{{ '<A>' + m['content'] }}{% endif %}
    {%- for call in m['tool_calls'] %}{{ '<call>' + call['function']['name'] + '\\n```json\\n' }}
    {{- call['function']['arguments'] + '\\n```<end>' }}
    {%- endfor %}
{%- endif %}
{%- if m['role'] == 'assistant' and 'tool_calls' not in m %}{{ '<A>' + m['content'] + '<eos>' }}{% endif %}
{%- if m['role'] == 'tool' %}{{ '<R>' + m['content'] }}{% endif %}
{%- endfor %}"""
# R1-0528's looks for thoughts in the content, which null has none of.
THIRD = SECOND.replace("{% for m in messages %}", "{% for m in messages %}{{ '' if '</think>' in m['content'] }}", 1)
OBJECTS = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{"name": "{{ call.function.name }}"
{{- ', "arguments": ' }}{{ call.function.arguments | tojson }}}</call>
{%- endfor %}{% endfor %}"""
PARAMETERS = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<f={{ call.function.name }}>
{%- for key, value in call.function.arguments.items() %}<p={{ key }}>{{ value }}</p>{% endfor %}</f>
{%- endfor %}{% endfor %}"""
NOTHING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_RESULTS = NOTHING.replace("[", "{% if m.role != 'tool' %}[").replace("{% endfor", "{% endif %}{% endfor")
ALL = {
    "first": FIRST,
    "second": SECOND,
    "third": THIRD,
    "objects": OBJECTS,
    "parameters": PARAMETERS,
    "nothing": NOTHING,
}
TOKENS = {"bos_token": "<B>"}


def _words(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghij", k=12))


def _conversation(draw: random.Random, content: str | None, calls: int) -> tuple[list[dict], list[tuple[str, dict]]]:
    made = [(_words(draw), {_words(draw): "ö" + _words(draw), "n": draw.random()}) for _ in range(calls)]
    asked = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(made)
    ]
    results = [{"role": "tool", "content": _words(draw), "tool_call_id": each["id"]} for each in asked]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": asked},
        *results,
    ], made


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("content", [None, "", "I look it up"])
@pytest.mark.parametrize("template", ALL)
def test_nothing_of_a_call_is_lost(template, content, calls, seed):
    messages, made = _conversation(random.Random(seed), content, calls)
    text = ChatTemplate(ALL[template], TOKENS).render(plain_messages(messages), None, False)
    for name, arguments in made:
        assert name in text
        assert all(key in text and str(value) in text for key, value in arguments.items())
        if template != "parameters":
            assert json.dumps(arguments, ensure_ascii=False) in text
    assert all(message["content"] in text for message in messages[2:])
    assert (content or "") in text
    assert "None" not in text


def test_null_stays_null_and_arguments_are_the_text_that_the_template_joins():
    messages, ((name, arguments),) = _conversation(random.Random(3), None, 1)
    text = ChatTemplate(FIRST, TOKENS).render(plain_messages(messages), None, True)
    written = json.dumps(arguments, ensure_ascii=False)
    result = messages[2]["content"]
    assert text == f"<B><U>q<A><call>function<sep>{name}\n```json\n{written}\n```<end><R>{result}<A><think>\n"


def test_text_beside_calls_is_a_message_of_its_own_where_one_would_be_left_out():
    messages, ((name, _),) = _conversation(random.Random(4), "I look", 1)
    text = ChatTemplate(FIRST, TOKENS).render(plain_messages(messages), None, False)
    assert text.startswith(f"<B><U>q<A>I look<eos><A><call>function<sep>{name}\n")


@pytest.mark.parametrize("template", ["second", "objects", "parameters"])
def test_a_template_that_has_a_place_is_given_what_transformers_gives_it(template):
    messages, _ = _conversation(random.Random(5), "I look", 2)
    as_text = template == "second"
    theirs = messages if as_text else plain_messages(messages)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), chat_template=ALL[template], bos_token="<B>"
    )
    if as_text:
        for call in theirs[1]["tool_calls"]:
            call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
    expected = fast.apply_chat_template(theirs, tokenize=False)
    assert ChatTemplate(ALL[template], TOKENS).render(plain_messages(messages), None, False) == expected


def test_results_that_a_template_leaves_out_are_refused():
    messages, _ = _conversation(random.Random(6), None, 1)
    template = ChatTemplate(NO_RESULTS, {})
    with pytest.raises(ConfigError, match="leaves out messages of role 'tool'"):
        template.render(plain_messages(messages), None, False)
    assert template.render(plain_messages(messages[:1]), None, False) == "[user]q"


def test_a_template_for_tools_has_a_form_of_its_own():
    messages, ((name, arguments),) = _conversation(random.Random(7), None, 1)
    template = ChatTemplate(OBJECTS, TOKENS, with_tools=FIRST)
    tools = [{"type": "function", "function": {"name": name}}]
    assert f"\n```json\n{json.dumps(arguments, ensure_ascii=False)}" in template.render(
        plain_messages(messages), tools, False
    )
    assert f'"arguments": {json.dumps(arguments, ensure_ascii=False)}' in template.render(
        plain_messages(messages), None, False
    )
