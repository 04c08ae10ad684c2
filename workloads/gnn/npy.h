// NumPy's files of arrays: .npy, and those of an .npz that np.savez wrote. Source: numpy.lib.format
// and PKWARE's APPNOTE.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/data_file.h"
#include "smartinf/base/status.h"

namespace smartinf::workloads {

/// An array in a file, in C order; numbers of this machine's byte order.
class NpyFile {
 public:
  static base::Result<NpyFile> open(const std::string& path);
  /// Every array of an .npz by its name. Errors: kUnsupported for a compressed one.
  static base::Result<std::map<std::string, NpyFile>> open_all(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<uint64_t>& shape() const { return shape_; }
  uint64_t rows() const { return shape_.empty() ? 1 : shape_[0]; }
  uint64_t count() const;
  const std::string& type() const { return type_; }  // as NumPy has it: "<f4"

  /// Values [first, first + out.size()) as T: numbers that it holds. Errors: kInvalidArgument,
  /// another kind of numbers (floats where T is an integer) or one that T does not hold; kCorrupt,
  /// the file is too short; kIo. T: float, or an integer.
  template <typename T>
  base::Status read(uint64_t first, std::span<T> out) const;
  template <typename T>
  base::Result<std::vector<T>> read_all() const {
    std::vector<T> values(count());
    SI_RETURN_IF_ERROR(read(0, std::span(values)));
    return values;
  }

 private:
  static base::Result<NpyFile> at(std::shared_ptr<const base::DataFile> file, std::string path,
                                  uint64_t offset);

  std::shared_ptr<const base::DataFile> file_;  // shared: by the arrays of an .npz
  std::string path_;
  std::string type_;
  std::vector<uint64_t> shape_;
  uint64_t offset_ = 0;
};

/// Writes an .npy file piece by piece; it has its name once finish() has succeeded, and nothing is
/// left without.
class NpyWriter {
 public:
  /// type: "<f4", "<u4"...
  static base::Result<NpyWriter> create(const std::string& path, const std::string& type,
                                        std::span<const uint64_t> shape);
  NpyWriter(NpyWriter&& other) noexcept;
  ~NpyWriter();
  base::Status append(std::span<const std::byte> bytes);
  base::Status finish();

 private:
  NpyWriter(std::string path, int file) : path_(std::move(path)), file_(file) {}
  std::string path_;
  int file_ = -1;
};

/// A whole array.
template <typename T>
base::Status write_npy(const std::string& path, const std::string& type, std::span<const T> values,
                       std::span<const uint64_t> shape) {
  SI_ASSIGN_OR_RETURN(NpyWriter writer, NpyWriter::create(path, type, shape));
  SI_RETURN_IF_ERROR(writer.append(std::as_bytes(values)));
  return writer.finish();
}
template <typename T>
base::Status write_npy(const std::string& path, const std::string& type,
                       const std::vector<T>& values) {
  const uint64_t count = values.size();
  return write_npy(path, type, std::span<const T>(values), std::span(&count, 1));
}

}  // namespace smartinf::workloads
