#include "smartinf/train/batch/prompt_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/train/batch/answer.h"

namespace smartinf::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PromptLine read(const std::string& text, uint64_t number = 7) {
  return read_prompt_line(text, number,
                          {.tokens = 12, .sampling = {.temperature = 0.5, .seed = 3}});
}
std::string chat(const std::string& body, const std::string& rest = "") {
  return R"({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {)" + body +
         "}" + rest + "}";
}
constexpr const char* kMessages = R"("messages": [{"role": "user", "content": "Hi"}])";

TEST(PromptLineTest, APlainLineSaysWhatItWants) {
  const PromptLine line = read(R"({"id": "x", "prompt": "Once", "max_tokens": 5, "temperature": 1,
      "top_p": 0.5, "top_k": 9, "seed": 8, "stop": ["\n", "."]})");
  EXPECT_EQ(line.error, "");
  EXPECT_EQ(line.form, PromptLine::Form::kPlain);
  EXPECT_EQ(line.id, "\"x\"");
  EXPECT_EQ(line.text, "Once");
  EXPECT_EQ(line.tokens_max, 5u);
  EXPECT_EQ(line.sampling.temperature, 1);
  EXPECT_EQ(line.sampling.top_p, 0.5);
  EXPECT_EQ(line.sampling.top_k, 9u);
  EXPECT_EQ(line.sampling.seed, 8u);
  EXPECT_THAT(line.stop, ElementsAre("\n", "."));
  EXPECT_TRUE(line.needs_text());
}

TEST(PromptLineTest, WhatALineLeavesOutIsTheDefault) {
  const PromptLine line = read(R"({"tokens": [1, 2], "stop": null})");
  EXPECT_EQ(line.error, "");
  EXPECT_EQ(line.id, "7");
  EXPECT_THAT(line.tokens, ElementsAre(1, 2));
  EXPECT_EQ(line.tokens_max, 12u);
  EXPECT_EQ(line.sampling.temperature, 0.5);
  EXPECT_FALSE(line.needs_text());
}

TEST(PromptLineTest, AnUnsaidSeedFollowsFromTheIdAlone) {
  const auto seed = [](const std::string& id, uint64_t number) {
    return read(R"({"prompt": "x", "id": )" + id + "}", number).sampling.seed;
  };
  EXPECT_EQ(seed("\"a\"", 1), seed("\"a\"", 2));
  EXPECT_NE(seed("\"a\"", 1), seed("\"b\"", 1));
  EXPECT_NE(seed("1", 1), seed("\"1\"", 1));
}

TEST(PromptLineTest, OpenAisRequestsAreTaken) {
  PromptLine line = read(chat(
      R"("model": "m", "messages": [{"role": "system", "content": "Be.", "refusal": null},
         {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]}],
         "max_completion_tokens": 4, "n": 1, "stream": false, "user": "u", "tools": null)"));
  EXPECT_EQ(line.error, "");
  EXPECT_EQ(line.form, PromptLine::Form::kChat);
  EXPECT_EQ(line.id, "\"a\"");
  EXPECT_EQ(line.model, "m");
  EXPECT_EQ(line.tokens_max, 4u);
  EXPECT_EQ(line.messages,
            R"([{"content":"Be.","role":"system"},{"content":"Hi you","role":"user"}])");
  line = read(R"({"custom_id": "b", "method": "POST", "url": "/v1/completions",
                  "body": {"prompt": [5, 6]}})");
  EXPECT_EQ(line.error, "");
  EXPECT_EQ(line.form, PromptLine::Form::kCompletion);
  EXPECT_THAT(line.tokens, ElementsAre(5, 6));
  EXPECT_TRUE(line.needs_text());
}

TEST(PromptLineTest, WhatCannotBeUsedIsNamed) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"{", "no JSON"},
      {"[1]", "no JSON object"},
      {std::string(100, '[') + std::string(100, ']'), "no JSON"},
      {R"({"prompt": "\xff"})", "no JSON"},
      {R"({})", "no prompt"},
      {R"({"prompt": ""})", "empty"},
      {R"({"tokens": []})", "empty"},
      {R"({"messages": []})", "empty"},
      {R"({"prompt": "a", "tokens": [1]})", "more than one"},
      {R"({"prompt": 3})", "prompt is 3"},
      {R"({"tokens": [1, -2]})", "has -2"},
      {R"({"tokens": [1, 1.5]})", "has 1.5"},
      {R"({"prompt": "a", "max_token": 3})", "unknown field: max_token"},
      {R"({"prompt": "a", "max_tokens": 0})", "max_tokens is 0"},
      {R"({"prompt": "a", "max_tokens": "3"})", "max_tokens is \"3\""},
      {R"({"prompt": "a", "temperature": -1})", "temperature is -1"},
      {R"({"prompt": "a", "top_p": 0})", "top_p is 0"},
      {R"({"prompt": "a", "top_k": 5000000000})", "top_k"},
      {R"({"prompt": "a", "seed": 1.5})", "seed"},
      {R"({"prompt": "a", "stop": [""]})", "stop"},
      {R"({"tokens": [1], "stop": "a"})", "stop needs text"},
      {R"({"prompt": "a", "id": [1]})", "id is [1]"},
      {R"({"messages": [{"role": "user"}]})", "no content"},
      {R"({"messages": [{"content": "x"}]})", "no role"},
      {R"({"messages": [{"role": "user", "content": "x", "tool_calls": []}]})", "tool_calls"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", "no text"},
      {chat(kMessages, R"(, "priority": 1)"), "unknown field: priority"},
      {chat(std::string(kMessages) + R"(, "n": 2)"), "body.n"},
      {chat(std::string(kMessages) + R"(, "logit_bias": {"1": 2})"), "body.logit_bias"},
      {chat(R"("prompt": "x")"), "body.prompt"},
      {R"({"custom_id": "a", "body": {}})", "no method"},
      {R"({"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})",
       "custom_id"},
      {R"({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}})",
       "method"},
      {R"({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"prompt": "x"}})",
       "/v1/embeddings"}};
  for (const auto& [text, says] : cases) EXPECT_THAT(read(text).error, HasSubstr(says)) << text;
}

TEST(AnswerTest, AnswersHaveTheFormOfTheirLines) {
  const std::vector<int64_t> tokens{4, 5};
  const Answer answer{"so", tokens, true, 3};
  EXPECT_EQ(answer_line(read(R"({"id": 1, "prompt": "x"})"), answer, 9),
            R"({"id":1,"text":"so","tokens":[4,5],"finish_reason":"stop","prompt_tokens":3})"
            "\n");
  EXPECT_EQ(answer_line(read(R"({"tokens": [1]})"), {"", tokens, false, 1}, 9),
            R"({"id":7,"tokens":[4,5],"finish_reason":"length","prompt_tokens":1})"
            "\n");
  EXPECT_EQ(
      answer_line(read(chat(kMessages)), answer, 9),
      R"({"id":"batch_req_0000000000000009_7","custom_id":"a","response":{"status_code":200,)"
      R"("request_id":"chatcmpl-0000000000000009-7","body":{"id":"chatcmpl-0000000000000009-7",)"
      R"("object":"chat.completion","created":0,"model":"","choices":[{"index":0,"message":)"
      R"({"role":"assistant","content":"so"},"logprobs":null,"finish_reason":"stop"}],"usage":)"
      R"({"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}},"error":null})"
      "\n");
  EXPECT_EQ(error_line(read("{"), "why", 9), R"({"id":7,"error":"why"})"
                                             "\n");
  EXPECT_EQ(error_line(read(chat("")), "why", 9),
            R"({"id":"batch_req_0000000000000009_7","custom_id":"a","response":null,)"
            R"("error":{"code":"invalid_request","message":"why"}})"
            "\n");
}

}  // namespace
}  // namespace smartinf::train
