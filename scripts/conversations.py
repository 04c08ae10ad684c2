"""Documents of text and of conversations as tokens, and which of them count in the loss (docs/data.md).

Used by make_token_files.py; where that is compiled into smartinf, this text stands in place of its import.
"""
import bisect
import collections
import json
import os
import re

from bounded_tokenizer import BadInput

DOCUMENT_KEYS = {"messages", "conversations", "prompt", "completion", "text", "tools", "chat_template_kwargs"}
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
# Whether a message counts in the loss, as other programs have it: what the value says, and its contrary.
COUNTS = {"weight", "train", "trainable", "training", "loss", "loss_mask"}
COUNTS_NOT = {"mask", "masked", "ignore"}
ABOUT_LOSS = {"weight", "weights", "train", "trainable", "training", "loss", "mask", "masked", "ignore", "learn",
              "thinking"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers hands each over under all three names
SPACE = re.compile(r"\s*")


def about_loss(key):
    """It has a word of those that other programs mark with what is to be learnt."""
    return not ABOUT_LOSS.isdisjoint(re.split(r"[\W_]+", key.lower()))


def says_nothing(key, value):
    """The mark has the value that it has where nothing is marked."""
    return value is None or key in COUNTS and value in (True, 1) or key in COUNTS_NOT and value in (False, 0)


def unpacked(value, key):
    """Lists and objects that a data set stores as a string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{key} is a string, and no JSON: {error}") from None


def with_mark(content, mark, in_front=False):
    """The mark at the words' end (or beginning), within white space, which templates strip."""
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        wordy = [part for part in parts if part["text"].strip()]
        if wordy:
            part = wordy[0 if in_front else -1]
            part["text"] = with_mark(part["text"], mark, in_front)
        return parts
    words = content.strip()
    if not words:
        return content
    before, _, behind = content.partition(words)
    return before + (mark + words if in_front else words + mark) + behind


def has_words(message):
    content = message.get("content")
    return any(part["text"].strip() for part in content) if isinstance(content, list) else bool((content or "").strip())


class Turns:
    """Where the assistant's messages stand in the text that a chat template makes of a conversation.

    Each message gets a mark (a character of a private plane) at its end, which is looked up in what the template
    writes, so that a template may write earlier turns otherwise than it wrote them when they were the last. What the
    assistant says begins where the template, asked for the beginning of a turn, would have left off, and ends with the
    last token that stands for itself, as <|im_end|> does: white space behind it is not the assistant's."""

    def __init__(self, tokenizer, messages, options):
        self.tokenizer, self.messages, self.options = tokenizer, messages, options
        self.text = tokenizer.render(messages, **options)
        self.added = tokenizer.added_tokens
        for self.plane in (0xF0000, 0x100000):
            if not self.marks().search(self.text):
                break
        else:
            raise BadInput("it uses characters of both private planes")
        if len(messages) > 0x7F00:
            raise BadInput(f"it has {len(messages)} messages")
        self.prompts = {}  # how the assistant's turn begins, by the role before it

    def marks(self):
        return re.compile(f"[{chr(self.plane)}-{chr(self.plane + 0xFFFD)}]")

    def end_of(self, index):
        return chr(self.plane + 2 * index)

    def begin_of(self, index):
        return chr(self.plane + 2 * index + 1)

    def untold(self, index):
        return BadInput("the chat template writes a conversation in such a way that the words of message "
                        f"{index + 1} cannot be told apart", advice="untold")

    def marked(self, count, **options):
        """The text of so many messages, and in it the place of each mark."""
        messages = []
        for index, message in enumerate(self.messages[:count]):
            if has_words(message):
                content = with_mark(message["content"], self.end_of(index))
                if index > 0 and not has_end(self.messages[index - 1]):
                    content = with_mark(content, self.begin_of(index), in_front=True)
                message = {**message, "content": content}
            messages.append(message)
        pieces, places, at, length = [], {}, 0, 0
        text = self.tokenizer.render(messages, **self.options, **options)
        for found in self.marks().finditer(text):
            pieces.append(text[at:found.start()])
            length += found.start() - at
            at = found.end()
            # What a template writes twice stands where it did so last.
            places[found[0]] = length
        return "".join(pieces) + text[at:], places

    def ranges(self, wanted):
        """Of each message of `wanted`."""
        plain, places = self.marked(len(self.messages))
        if plain != self.text:
            raise self.untold(wanted[0])
        self.end_mark = self.find_end_mark(wanted, places)
        return [self.range_of(index, places) for index in wanted]

    def find_end_mark(self, wanted, places):
        """What the template writes behind the assistant's words, up to the last token that stands for itself."""
        index = next((i for i in reversed(wanted) if has_end(self.messages[i])), None)
        if index is not None:
            text, places = (self.text, places) if index == len(self.messages) - 1 else self.marked(index + 1)
            tail = text[self.words_end(index, text, places):]
            last = list(self.added.finditer(tail))
            return tail[:last[-1].end()].lstrip() if last else tail
        last = wanted[-1]
        text = self.text if last == len(self.messages) - 1 else self.marked(last + 1)[0]
        found = list(self.added.finditer(text))
        return found[-1][0] if found and not text[found[-1].end():].strip() else ""

    def words_end(self, index, text, places):
        """With the message's own white space, where the template does not strip it."""
        end = places.get(self.end_of(index))
        if end is None:
            raise self.untold(index)
        content = self.messages[index]["content"]
        words = content if isinstance(content, str) else [part["text"] for part in content if part["text"].strip()][-1]
        space = words[len(words.rstrip()):]
        return end + len(space) if text.startswith(space, end) else end

    def begin(self, index, places, end):
        """Behind what the template writes as the beginning of the assistant's turn."""
        before = next((i for i in range(index - 1, -1, -1) if has_words(self.messages[i])), None)
        if before is None:
            question = [{"role": "user", "content": "?"}]
            asked = self.tokenizer.render(question, **self.options)
            opened = self.tokenizer.render(question, **self.options, add_generation_prompt=True)
            head = opened[len(asked):] if opened.startswith(asked) else ""
            at = self.text.find(head, 0, end)
            if at < 0 or not head:
                raise self.untold(index)
            return at + len(head)
        # The same for all that stand behind a message of the same role.
        kind = self.messages[before]["role"] if before == index - 1 else index
        if kind not in self.prompts:
            text, there = self.marked(index, add_generation_prompt=True)
            if self.end_of(before) not in there:
                raise self.untold(index)
            self.prompts[kind] = text[there[self.end_of(before)]:].lstrip()
        prompt = self.prompts[kind]
        at = places.get(self.end_of(before), len(self.text) + 1)
        if at > end:
            raise self.untold(index)
        at = SPACE.match(self.text, at).end()
        same = len(os.path.commonprefix([prompt, self.text[at:at + len(prompt)]]))
        if prompt and same == 0:
            raise self.untold(index)
        return min(at + same, end)

    def range_of(self, index, places):
        if has_end(self.messages[index]):
            end = self.words_end(index, self.text, places)
            begin, mark = self.begin(index, places, end), self.end_mark
            at = SPACE.match(self.text, end).end() if mark.strip() else end
            same = os.path.commonprefix([mark, self.text[at:at + len(mark)]])
            last = list(self.added.finditer(same))
            return begin, at + (last[-1].end() if last else len(same)) if same else end
        # Calls of tools, or nothing: up to the next message's words.
        following = next((i for i in range(index + 1, len(self.messages)) if has_words(self.messages[i])), None)
        limit = len(self.text)
        if following is not None:
            limit = places.get(self.begin_of(following), places.get(self.end_of(following), -1))
        begin = self.begin(index, places, limit)
        end = self.text.rfind(self.end_mark, begin, limit) if self.end_mark else -1
        if end >= 0:
            return begin, end + len(self.end_mark)
        # No token ends it, or another one than that of an answer.
        behind = self.tokenizer.render(self.messages[:index + 1], **self.options)
        if not self.text.startswith(behind) or len(behind) <= begin:
            raise self.untold(index)
        return begin, len(behind)


def has_end(message):
    """Its words are the last of its turn."""
    return has_words(message) and not message.get("tool_calls")


def within(places, ranges):
    """For each token whether it has a character of the ranges, which ascend."""
    ends = [end for _, end in ranges]
    mask = []
    for begin, end in places:
        at = bisect.bisect_right(ends, begin)
        mask.append(int(at < len(ranges) and end > ranges[at][0]))
    return mask


class Documents:
    """Makes documents, each a list of tokens and one of zeros and ones: which of them count."""

    def __init__(self, tokenizer, count, end):
        self.tokenizer = tokenizer
        self.count = count
        self.end = end  # token behind each text; None: none
        self.unused = collections.Counter()  # keys that change nothing
        self.taken_parts = {}  # by template
        self.calls_as_text = False

    def of_text(self, text, counted_from=0):
        tokens, places = self.tokenizer.encode(text, add_special_tokens=self.tokenizer.folder)
        if not tokens:
            raise BadInput("it is empty")
        first = 0 if self.count == "all" else counted_from
        mask = [int(first == 0 or end > first) for _, end in places]
        if self.end is not None and tokens[-1:] != [self.end]:
            return tokens + [self.end], mask + [1]
        return tokens, mask[:-1] + [1]

    def of_messages(self, messages, options, marks, counted_from=0):
        """marks: of each message whether it counts, None: nothing says so. counted_from: the message from which on the
        assistant's words count."""
        tokenizer = self.tokenizer
        template = tokenizer.chat_template(options.get("tools"))
        messages = [self.as_template_wants(message, template) for message in messages]
        self.note_unused(messages, options, template)
        if self.count == "all":
            text = tokenizer.render(messages, **options)
            tokens, _ = tokenizer.encode(text, add_special_tokens=False)
            return tokens, [1] * len(tokens)
        of_assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in of_assistant if i >= counted_from and marks[i] is not False]
        if not wanted:
            raise BadInput("there is no message of the assistant that counts", advice="none counts")
        if not re.search(r"\{%-?\s*generation\b", template):
            turns = Turns(tokenizer, messages, options)
            tokens, places = tokenizer.encode(turns.text, add_special_tokens=False)
            return tokens, within(places, turns.ranges(wanted))
        made = tokenizer.render(messages, **options, tokenize=True, return_dict=True,
                                return_assistant_tokens_mask=True)
        tokens, mask = made["input_ids"], made["assistant_masks"]
        if wanted != of_assistant:
            turns = Turns(tokenizer, messages, options)
            _, places = tokenizer.encode(turns.text, add_special_tokens=False)
            mask = [a & b for a, b in zip(mask, within(places, turns.ranges(wanted)), strict=True)]
        return tokens, mask

    def as_template_wants(self, message, template):
        """Content that is text or a list of parts: as it is where the template writes it, else in the other form."""
        content = message.get("content")
        if content is None:
            return message
        if template not in self.taken_parts:
            self.taken_parts[template] = {form: self.writes(form) for form in (str, list)}
        takes = self.taken_parts[template]
        if isinstance(content, list) and not takes[list]:
            return {**message, "content": "".join(part["text"] for part in content)}
        if isinstance(content, str) and takes[list] and not takes[str]:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def writes(self, form):
        """The template writes such content as it should."""
        words = "some words"
        try:
            made = self.tokenizer.render([{"role": "user", "content": words if form is str else
                                           [{"type": "text", "text": words}]}])
        except BadInput:
            return False
        return words in made and "'text'" not in made

    def note_unused(self, messages, options, template):
        for message in messages:
            for key in message.keys() - {"role", "content"}:
                names = REASONING if key in REASONING else (key,)
                if any(name in template for name in names):
                    continue
                if key == "tool_calls" and message[key]:
                    raise BadInput("it has tool_calls, which the chat template does not write")
                self.unused[f"{key} of messages"] += message[key] is not None
        for key in options.keys():
            self.unused[key] += key not in template

    def options_of(self, entry):
        options = {}
        tools = unpacked(entry.get("tools"), "tools")
        if tools:
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise BadInput("tools is no list of objects")
            options["tools"] = tools
        more = unpacked(entry.get("chat_template_kwargs"), "chat_template_kwargs")
        if more is not None and not isinstance(more, dict):
            raise BadInput("chat_template_kwargs is no object")
        for key, value in (more or {}).items():
            if key in ("tools", "messages", "conversation", "tokenize", "return_dict", "add_generation_prompt",
                       "chat_template", "return_assistant_tokens_mask", "continue_final_message", "padding",
                       "truncation", "max_length", "return_tensors", "tokenizer_kwargs", "sanitize_control_tokens"):
                raise BadInput(f"chat_template_kwargs has {key}, which is no variable of a template")
            options[key] = value
        return options

    def check_keys(self, entry, used):
        for key, value in entry.items():
            if key in used:
                continue
            if key not in DOCUMENT_KEYS and not says_nothing(key, value):
                if about_loss(key):
                    advice = " (chat_template_kwargs is for variables of the template)" if "thinking" in key else ""
                    raise BadInput(f'its key "{key}" would say what is learnt, and is not known here{advice}')
                if key == "label" and isinstance(value, bool):
                    raise BadInput('its key "label" would say whether the completion is wanted')
            self.unused[key] += value is not None

    def of_entry(self, entry):
        """Of a value of JSON."""
        try:
            return self.of_object(entry)
        except BadInput as error:
            if error.advice != "template" or "arguments" not in json.dumps(entry):
                raise
            # Some templates take arguments of calls as they come from OpenAI: strings of JSON.
            self.calls_as_text = True
            try:
                return self.of_object(entry)
            except BadInput:
                raise error from None
        finally:
            self.calls_as_text = False

    def of_object(self, entry):
        if is_conversation(entry):
            entry = {"messages": entry}
        if not isinstance(entry, dict):
            raise BadInput("not a JSON object")
        key = next((key for key in ("messages", "conversations") if entry.get(key) is not None), None)
        if key is not None:
            self.check_keys(entry, {key, "tools", "chat_template_kwargs"})
            messages, marks = self.messages_of(entry[key], key)
            return self.of_messages(messages, self.options_of(entry), marks)
        if "prompt" in entry and "completion" in entry:
            prompt, completion = entry["prompt"], entry["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                self.check_keys(entry, {"prompt", "completion"})
                if not completion:
                    raise BadInput("the completion is empty")
                return self.of_text(prompt + completion, counted_from=len(prompt))
            self.check_keys(entry, {"prompt", "completion", "tools", "chat_template_kwargs"})
            prompt, marks = self.messages_of(prompt, "prompt")
            completion, more = self.messages_of(completion, "completion")
            return self.of_messages(prompt + completion, self.options_of(entry), marks + more,
                                    counted_from=len(prompt))
        if isinstance(entry.get("text"), str):
            self.check_keys(entry, {"text"})
            return self.of_text(entry["text"])
        keys = ", ".join(f'"{key}"' for key in list(entry)[:8])
        raise BadInput('neither "messages" nor "prompt" and "completion" nor "text" is in it' +
                       (f", but {keys}" if keys else ""))

    def messages_of(self, messages, key):
        """As templates take them, and of each whether it counts."""
        if key not in ("prompt", "completion"):
            messages = unpacked(messages, key)
        if not isinstance(messages, list) or not messages:
            raise BadInput(f"{key} is not a list of messages")
        made, marks = [], []
        for number, message in enumerate(messages, 1):
            where = f"message {number} of {key}"
            if not isinstance(message, dict):
                raise BadInput(f"{where} has no role")
            if "from" in message and "role" not in message:
                message = {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value"),
                           **{k: v for k, v in message.items() if k not in ("from", "value")}}
                if message["role"] not in ("system", "user", "assistant", "tool"):
                    raise BadInput(f"{where} is from \"{str(message['role'])[:40]}\", which is not known here")
            if not isinstance(message.get("role"), str):
                raise BadInput(f"{where} has no role")
            marks.append(self.mark_of(message, where))
            message = {k: v for k, v in message.items() if k not in COUNTS | COUNTS_NOT and v is not None}
            if "tool_calls" in message:
                message["tool_calls"] = calls_of(message["tool_calls"], where, self.calls_as_text)
            content = message.get("content")
            if isinstance(content, list):
                for part in content:
                    kind = part.get("type") if isinstance(part, dict) else None
                    if kind != "text" or not isinstance(part.get("text"), str):
                        raise BadInput(f"{where} has a part that is no text ({str(kind)[:40]})")
            elif not isinstance(content, str) and not message.get("tool_calls"):
                raise BadInput(f"{where} has no content that is text")
            made.append(message)
        return made, marks

    def mark_of(self, message, where):
        said = {}
        for key, value in message.items():
            if key not in COUNTS | COUNTS_NOT:
                if (about_loss(key) and key not in REASONING or key == "function_call") and value is not None:
                    raise BadInput(f'{where} has the key "{key}", which is not known here')
                continue
            if value is None:
                continue
            if value not in (0, 1):
                found = json.dumps(value, ensure_ascii=False)[:40]
                raise BadInput(f'{where} has "{key}": {found}; a message counts or does not (0 or 1)')
            said[key] = bool(value) == (key in COUNTS)
        if len(set(said.values())) > 1:
            raise BadInput(f"{where} says both that it counts and that it does not: {', '.join(said)}")
        for key, counts in said.items():
            if counts and message["role"] != "assistant" and key != "weight":
                raise BadInput(f'{where} is the {message["role"]}\'s, and "{key}" says that it counts')
            if not counts and self.count == "all" and message["role"] == "assistant":
                raise BadInput(f'"{key}" of {where} says that it does not count', advice="all counts")
            return counts
        return None


def calls_of(calls, where, as_text):
    """Arguments as the objects that most templates take, where they are strings of JSON, or as such strings."""
    calls = unpacked(calls, f"tool_calls of {where}")
    if not isinstance(calls or [], list) or not all(isinstance(call, dict) for call in calls or []):
        raise BadInput(f"tool_calls of {where} is no list of objects")
    made = []
    for call in calls or []:
        holder = call.get("function") if isinstance(call.get("function"), dict) else call
        arguments = holder.get("arguments")
        objects = unpacked(arguments, f"arguments of a call of {where}")
        if isinstance(arguments, str) and not as_text:
            arguments = {} if objects is None else objects
        elif as_text and arguments is not None and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if arguments is not None:
            holder = {**holder, "arguments": arguments}
            call = {**call, "function": holder} if isinstance(call.get("function"), dict) else holder
        made.append(call)
    return made


def is_conversation(value):
    return (isinstance(value, list) and bool(value) and
            all(isinstance(message, dict) and ("role" in message or "from" in message) for message in value))
