// The weights in a folder of Hugging Face's: safetensors, one file or several with an index, those
// that transformers would read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/float_formats.h"
#include "smartinf/base/status.h"
#include "smartinf/model/architecture.h"
#include "smartinf/model/safetensors.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::model {

/// All files open, every header read and every tensor found. Threads: const members are safe from
/// any thread.
class WeightFiles {
 public:
  /// Errors: kNotFound (no weights there, or a file that the index names), kCorrupt (a header, an
  /// index, a name that leaves the folder), kInvalidArgument (a link that does), kMismatch with the
  /// tensor's name (missing, surplus, of another shape, in the index or the files alone),
  /// kUnsupported (another type, or another format of files).
  static base::Result<WeightFiles> open(const std::string& folder,
                                        const Architecture& architecture);

  const std::string& folder() const { return folder_; }
  /// The type of all tensors, where it is one.
  std::optional<base::DataType> type() const;
  uint64_t bytes() const;

  /// Puts elements [first, first + out.size()) of the parameter space into out, as f32. Errors:
  /// kCorrupt for a value that is not finite, with its tensor and file; kIo.
  base::Status read(uint64_t first, std::span<float> out) const;
  /// The same of [first, first + count), of another type. What has that type in the files is handed
  /// out as it is, finite or not.
  base::Status read_as(base::DataType type, uint64_t first, uint64_t count, std::byte* out) const;
  /// Digest of all weights, in the order of the parameter space: other weights have another one,
  /// wherever they lie in files. Reads everything. progress: of bytes; its failure ends it. Errors:
  /// as read().
  base::Result<uint64_t> digest(
      const std::function<base::Status(uint64_t done, uint64_t total)>& progress = {}) const;
  /// Digest of sizes and of both ends of the files, which adapters of earlier versions go by.
  base::Result<uint64_t> digest_of_ends() const;

 private:
  struct Place {
    size_t file = 0;
    uint64_t offset = 0;  // bytes
    base::DataType type = base::DataType::kF32;
  };
  base::Status find_files(const std::string& folder);
  base::Status check_index(size_t file, const SafetensorsHeader& header) const;
  base::Status find_tensors(const Architecture& architecture);
  base::Status check_tied_head(const Place& head) const;
  base::Status read_place(const Place& place, uint64_t within, std::span<float> out) const;
  base::Status not_finite(size_t range, uint64_t within, float value) const;
  base::Status read_range(size_t range, uint64_t within, std::span<float> out) const;

  std::string folder_;
  std::map<std::string, std::string> index_;  // by tensor its file's name; empty: there is no index
  std::vector<base::DataFile> files_;
  plan::ParameterSpace space_;
  std::vector<Place> places_;  // by range of the space
};

}  // namespace smartinf::model
