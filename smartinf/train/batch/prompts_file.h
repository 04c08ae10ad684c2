// The file of a batch's prompts, a line each. It may be larger than memory: of each line its place
// is kept, and its checksum, so that a file that changes meanwhile is noticed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/status.h"

namespace smartinf::train {

/// Lines are counted from 1. Threads: one caller.
class PromptsFile {
 public:
  /// A line without its end; of one that is longer than kPromptLineBytesMax a byte more than that.
  using Visit = std::function<base::Status(uint64_t number, std::string_view text)>;

  /// Reads the file once and visits every line. Errors: of base::DataFile::open() and of `visit`.
  static base::Result<PromptsFile> open(const std::string& path, const Visit& visit);

  uint64_t lines() const { return lines_.size(); }
  /// Of the whole file.
  uint64_t digest() const { return digest_; }
  /// A line as it was visited. Errors: kCorrupt where it is not as it was; kIo.
  base::Result<std::string> read(uint64_t number) const;

 private:
  struct Line {
    uint64_t offset;  // bytes
    uint64_t bytes;   // without its end, and no more than were visited
    uint64_t checksum;
  };
  explicit PromptsFile(base::DataFile file) : file_(std::move(file)) {}
  base::Status visit_line(uint64_t offset, std::string_view text, const Visit& visit);

  base::DataFile file_;
  std::vector<Line> lines_;
  uint64_t digest_ = 0;
};

/// Whether a line has nothing but white space.
bool is_blank(std::string_view text);

}  // namespace smartinf::train
