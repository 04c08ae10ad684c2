#include "apps/smartinf/text_codec.h"

#include <utility>

#include <nlohmann/json.hpp>

#include "smartinf/train/corpus.h"

namespace smartinf::apps {

using base::ErrorCode;
using base::Result;
using base::Status;
using Json = nlohmann::json;

Result<TextCodec> TextCodec::open(const train::TextForm& form) {
  if (form.bytes) return TextCodec(std::nullopt);
  if (form.tokenizer.empty()) {
    return Status(ErrorCode::kNotFound, "the model has no tokenizer.json",
                  "Put it into the model's folder (transformers' AutoTokenizer writes one with "
                  "save_pretrained()), name it in data.tokenizer of the recipe, or give numbers of "
                  "tokens with --prompt-tokens");
  }
  SI_ASSIGN_OR_RETURN(
      PythonScript script,
      PythonScript::start(tokenize_text_script(), {form.tokenizer}, ScriptOutput::kAnswers));
  return TextCodec(std::move(script));
}

Result<Json> TextCodec::ask(const Json& request) {
  // One that has ended, and takes no more, may have said why.
  (void)script_->write(request.dump(-1, ' ', true, Json::error_handler_t::replace) + "\n");
  if (const std::optional<std::string> line = script_->read_line()) {
    Json answer = Json::parse(*line, nullptr, /*allow_exceptions=*/false);
    if (answer.is_object() && !answer.contains("error")) return answer;
    if (answer.is_object()) {
      return Status(
          answer.contains("ended") ? ErrorCode::kFailedPrecondition : ErrorCode::kInvalidArgument,
          "the tokenizer: " + answer["error"].get<std::string>());
    }
  }
  return Status(ErrorCode::kFailedPrecondition, "the tokenizer does not run",
                "See what Python says above");
}

Result<std::vector<int64_t>> TextCodec::encode_messages(const Json& messages) {
  if (!script_) {
    return Status(ErrorCode::kInvalidArgument, "the model has no chat template",
                  "Give prompts that are no messages");
  }
  SI_ASSIGN_OR_RETURN(const Json answer, ask({{"chat", messages}}));
  return answer.at("tokens").get<std::vector<int64_t>>();
}

Result<std::vector<int64_t>> TextCodec::encode(const std::string& text, bool chat) {
  if (script_) {
    SI_ASSIGN_OR_RETURN(const Json answer, ask({{chat ? "chat" : "encode", text}}));
    return answer.at("tokens").get<std::vector<int64_t>>();
  }
  if (chat) {
    return Status(ErrorCode::kInvalidArgument, "--chat: the model has no chat template",
                  "Leave it out");
  }
  std::vector<int64_t> tokens;
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

Result<std::string> TextCodec::decode(std::span<const int64_t> tokens) {
  if (script_) {
    SI_ASSIGN_OR_RETURN(const Json answer,
                        ask({{"decode", std::vector<int64_t>(tokens.begin(), tokens.end())}}));
    return answer.at("text").get<std::string>();
  }
  std::string text;
  for (const int64_t token : tokens) {
    if (token != train::kByteSeparator) text += static_cast<char>(token);
  }
  return text;
}

Result<std::string> TextCodec::continuation(std::span<const int64_t> prompt,
                                            std::span<const int64_t> made) {
  SI_ASSIGN_OR_RETURN(const std::string before, decode(prompt));
  std::vector<int64_t> all(prompt.begin(), prompt.end());
  all.insert(all.end(), made.begin(), made.end());
  SI_ASSIGN_OR_RETURN(std::string text, decode(all));
  if (text.starts_with(before)) return text.substr(before.size());
  return decode(made);
}

}  // namespace smartinf::apps
