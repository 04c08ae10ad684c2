#include "smartinf/train/batch/prompts_file.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/units.h"
#include "smartinf/train/batch/prompt_line.h"

namespace smartinf::train {

using base::Result;
using base::Status;

namespace {

uint64_t line_sum(std::string_view text) { return base::checksum(std::as_bytes(std::span(text))); }

}  // namespace

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

Status PromptsFile::visit_line(uint64_t offset, std::string_view text, const Visit& visit) {
  lines_.push_back({offset, text.size(), line_sum(text)});
  return visit(lines_.size(), text);
}

Result<PromptsFile> PromptsFile::open(const std::string& path, const Visit& visit) {
  SI_ASSIGN_OR_RETURN(base::DataFile opened, base::DataFile::open(path));
  PromptsFile file(std::move(opened));
  std::string piece(base::kMiB, '\0');
  std::string line;
  uint64_t offset = 0;  // of the line
  const uint64_t size = file.file_.size();
  for (uint64_t at = 0; at < size; at += piece.size()) {
    piece.resize(std::min<uint64_t>(base::kMiB, size - at));
    SI_RETURN_IF_ERROR(file.file_.read(at, std::as_writable_bytes(std::span(piece))));
    file.digest_ = base::checksum(std::as_bytes(std::span(piece)), file.digest_);
    for (uint64_t begin = 0; begin < piece.size();) {
      const uint64_t end = std::min<uint64_t>(piece.find('\n', begin), piece.size());
      const uint64_t room = kPromptLineBytesMax + 1 - line.size();
      line.append(piece, begin, std::min(end - begin, room));
      begin = end + 1;
      if (end == piece.size()) break;
      SI_RETURN_IF_ERROR(file.visit_line(offset, line, visit));
      offset = at + begin;
      line.clear();
    }
  }
  if (!line.empty()) SI_RETURN_IF_ERROR(file.visit_line(offset, line, visit));
  return file;
}

Result<std::string> PromptsFile::read(uint64_t number) const {
  const Line& line = lines_.at(number - 1);
  std::string text(line.bytes, '\0');
  SI_RETURN_IF_ERROR(file_.read(line.offset, std::as_writable_bytes(std::span(text))));
  if (line_sum(text) == line.checksum) return text;
  return Status(base::ErrorCode::kCorrupt, fmt::format("line {} has changed meanwhile", number),
                "Leave the file of prompts as it is while they are answered",
                {file_.path(), line.offset, line.bytes, 0});
}

}  // namespace smartinf::train
