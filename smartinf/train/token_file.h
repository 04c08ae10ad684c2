// The two forms of token files: llm.c's .bin, a stream of tokens, and safetensors files with a loss
// mask and the borders of documents (docs/data.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smartinf/base/status.h"
#include "smartinf/train/token_stream.h"

namespace smartinf::train {

/// Advice to make a token file.
inline constexpr const char* kTokenFileAdvice =
    "Make token files with scripts/make_token_files.py or llm.c's data scripts";

struct TokenFile {
  TokenSegment tokens;
  uint32_t vocabulary = 0;  // the smallest that holds its tokens; 0: the file does not say
  /// First token of each document, ascending from 0; empty: the file has no documents.
  std::vector<uint64_t> document_starts;
};

/// Whether the name is that of a token file.
bool is_token_file(const std::string& path);

/// Looks at the header and the documents; tokens and mask are read through the segment. Takes
/// memory for documents only, and no more than the file has bytes. Errors: kNotFound, kIo; kCorrupt
/// with what is wrong and where.
base::Result<TokenFile> read_token_file(const std::string& path);

}  // namespace smartinf::train
