#include "smartinf/train/batch/answer.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace smartinf::train {
namespace {

std::string as_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// What both answers and errors in OpenAI's form begin with.
nlohmann::ordered_json request_line(const PromptLine& line, uint64_t job) {
  return {{"id", fmt::format("batch_req_{:016x}_{}", job, line.number)},
          {"custom_id", nlohmann::json::parse(line.id)}};
}

}  // namespace

std::string answer_line(const PromptLine& line, const Answer& answer, uint64_t job) {
  const char* finish_reason = answer.stopped ? "stop" : "length";
  if (line.form == PromptLine::Form::kPlain) {
    nlohmann::ordered_json json{{"id", nlohmann::json::parse(line.id)}};
    if (line.needs_text()) json["text"] = answer.text;
    json["tokens"] = answer.tokens;
    json["finish_reason"] = finish_reason;
    json["prompt_tokens"] = answer.prompt_tokens;
    return as_line(json);
  }
  const bool chat = line.form == PromptLine::Form::kChat;
  nlohmann::ordered_json choice{{"index", 0}};
  if (chat) {
    choice["message"] = {{"role", "assistant"}, {"content", answer.text}};
  } else {
    choice["text"] = answer.text;
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = finish_reason;
  const std::string id = fmt::format("{}-{:016x}-{}", chat ? "chatcmpl" : "cmpl", job, line.number);
  nlohmann::ordered_json body{{"id", id},
                              {"object", chat ? "chat.completion" : "text_completion"},
                              {"created", 0},
                              {"model", line.model},
                              {"choices", nlohmann::ordered_json::array({choice})},
                              {"usage",
                               {{"prompt_tokens", answer.prompt_tokens},
                                {"completion_tokens", answer.tokens.size()},
                                {"total_tokens", answer.prompt_tokens + answer.tokens.size()}}}};
  nlohmann::ordered_json json = request_line(line, job);
  json["response"] = {{"status_code", 200}, {"request_id", id}, {"body", std::move(body)}};
  json["error"] = nullptr;
  return as_line(json);
}

std::string error_line(const PromptLine& line, std::string_view why, uint64_t job) {
  if (line.form == PromptLine::Form::kPlain) {
    return as_line({{"id", nlohmann::json::parse(line.id)}, {"error", why}});
  }
  nlohmann::ordered_json json = request_line(line, job);
  json["response"] = nullptr;
  json["error"] = {{"code", "invalid_request"}, {"message", why}};
  return as_line(json);
}

}  // namespace smartinf::train
