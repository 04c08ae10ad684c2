#include "smartinf/engine/striped_weights.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/checksum.h"
#include "smartinf/base/file.h"
#include "smartinf/base/state_format.h"
#include "smartinf/kernels/update.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/reserve_space.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Result;
using base::Status;

namespace {

static_assert(std::endian::native == std::endian::little, "headers are written as they are");

constexpr std::array<char, 8> kMagic{'S', 'I', 'W', 'E', 'I', 'G', 'H', 'T'};
constexpr uint32_t kVersion = 1;
constexpr size_t kChecksummedFrom = 16;  // of the header
constexpr storage::SpaceUse kForWeights{"the weights", "use another directory or one more"};

Status failed(ErrorCode code, std::string what, const char* advice, const std::string& path) {
  return Status(code, std::move(what), advice, base::ErrorPlace{path, {}, {}, 0});
}

Status damaged(std::string what, const std::string& path) {
  return failed(ErrorCode::kCorrupt, std::move(what),
                "Read the model again onto other directories; these files are a copy of its weights.",
                path);
}

std::string path_in(const std::string& directory) {
  return (std::filesystem::path(directory) / kWeightsFileName).string();
}

uint64_t stripe_bytes(const StripedHeader& set) {
  return set.stripe_elements * base::data_type_bytes(static_cast<base::DataType>(set.type));
}

uint64_t stripes_of(const StripedHeader& set, uint32_t file) {
  const uint64_t all = base::divide_up(set.elements, set.stripe_elements);
  return all > file ? base::divide_up(all - file, set.files) : 0;
}

uint64_t header_bytes(const StripedHeader& set, uint32_t file) {
  return base::round_up(
      sizeof(StripedHeader) + set.description_bytes + stripes_of(set, file) * sizeof(uint64_t),
      base::kIoAlignment);
}

/// Whether the numbers can be computed with.
bool possible(const StripedHeader& set) {
  const bool sane = set.type <= static_cast<uint32_t>(base::DataType::kF16) && set.files > 0 &&
                    set.file < set.files && set.elements > 0 &&
                    set.elements <= plan::ParameterSpace::kElementsMax && set.stripe_elements > 0 &&
                    set.stripe_elements % base::kBlockElements == 0 &&
                    set.stripe_elements <= plan::ParameterSpace::kElementsMax &&
                    set.description_bytes <= StripedWeights::kDescriptionBytesMax;
  return sane && base::divide_up(set.elements, set.stripe_elements) <= ~uint32_t{0};
}

/// Direct I/O, where the file system has it: these bytes are wanted once in a step, and would push
/// others out of the page cache.
void set_direct(int descriptor, bool direct) {
  const int flags = fcntl(descriptor, F_GETFL);
  const int wanted = direct ? flags | O_DIRECT : flags & ~O_DIRECT;
  if (flags >= 0 && wanted != flags) static_cast<void>(fcntl(descriptor, F_SETFL, wanted));
}

bool is_direct(int descriptor) { return (fcntl(descriptor, F_GETFL) & O_DIRECT) != 0; }

enum class Way : uint8_t { kRead, kWrite };

/// All of `bytes`, which are aligned as direct I/O asks.
Status transfer(Way way, int descriptor, const std::string& path, std::span<std::byte> bytes,
                uint64_t offset) {
  const uint64_t first = offset;
  const uint64_t length = bytes.size();
  while (!bytes.empty()) {
    const ssize_t moved =
        way == Way::kWrite
            ? pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset))
            : pread(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0 && errno == EINVAL && is_direct(descriptor)) {
      set_direct(descriptor, false);
      continue;
    }
    if (moved < 0) {
      return base::errno_status(
          errno, way == Way::kWrite ? "cannot write the weights" : "cannot read the weights", path,
          first, length);
    }
    if (moved == 0) return damaged("the file of weights has become shorter", path);
    offset += static_cast<uint64_t>(moved);
    bytes = bytes.subspan(static_cast<size_t>(moved));
  }
  if (!is_direct(descriptor)) {
    static_cast<void>(posix_fadvise(descriptor, static_cast<off_t>(first),
                                    static_cast<off_t>(length), POSIX_FADV_DONTNEED));
  }
  return Status();
}

Status lock_file(int descriptor, bool exclusive, const std::string& path) {
  if (flock(descriptor, (exclusive ? LOCK_EX : LOCK_SH) | LOCK_NB) == 0) return Status();
  if (errno != EWOULDBLOCK) return base::errno_status(errno, "cannot lock the weights", path);
  return failed(
      ErrorCode::kBusy, exclusive ? "the weights are in use" : "the weights are being written",
      "Close the model or wait for the process that uses them, or name another directory.", path);
}

/// Different directories, all of them there.
Status check_directories(const std::vector<std::string>& directories) {
  if (directories.empty()) {
    return Status(ErrorCode::kInvalidArgument, "no directory for the weights",
                  "Name at least one directory.");
  }
  std::set<std::pair<dev_t, ino_t>> seen;
  for (const std::string& directory : directories) {
    struct stat info {};
    if (stat(directory.c_str(), &info) != 0) {
      return base::errno_status(errno, "cannot examine the directory for the weights", directory,
                                {}, {}, "Make the directory, or name another one.");
    }
    if (!S_ISDIR(info.st_mode)) {
      return failed(ErrorCode::kInvalidArgument, "weights need a directory",
                    "Name a directory; a block device holds optimizer state only.", directory);
    }
    if (!seen.emplace(info.st_dev, info.st_ino).second) {
      return failed(ErrorCode::kInvalidArgument, "the directory is named twice", "Name it once.",
                    directory);
    }
  }
  return Status();
}

}  // namespace

// ---- Making and opening.

StripedWeights::StripedWeights(std::shared_ptr<Files> files, std::string description)
    : WeightReader(files->set.elements, files->set.stripe_elements, files),
      files_(std::move(files)),
      description_(std::move(description)) {}

StripedWeights::~StripedWeights() {
  // A forked child has the descriptors too, and with them the locks; so has a read that hangs.
  for (const File& file : files_->files) static_cast<void>(flock(file.descriptor.get(), LOCK_UN));
}

Result<StripedWeights::File> StripedWeights::open_file(const std::string& directory, bool write) {
  File file;
  file.directory = directory;
  file.path = path_in(directory);
  struct stat info {};
  do {  // again when somebody has deleted it before it was locked
    SI_ASSIGN_OR_RETURN(const int descriptor,
                        base::open_regular_file(file.path, write ? O_RDWR | O_CREAT : O_RDONLY,
                                                "cannot open the weights"));
    file.descriptor = storage::FileDescriptor(descriptor);
    SI_RETURN_IF_ERROR(lock_file(descriptor, write, file.path));
    if (fstat(descriptor, &info) != 0) {
      return base::errno_status(errno, "cannot examine the weights", file.path);
    }
  } while (info.st_nlink == 0);
  file.ours = info.st_size == 0;
  set_direct(file.descriptor.get(), true);
  return file;
}

uint64_t StripedWeights::file_bytes(const StripedHeader& set, uint32_t file,
                                    uint64_t header_bytes) {
  const uint64_t stripes = stripes_of(set, file);
  if (stripes == 0) return header_bytes;
  const uint64_t last = (stripes - 1) * set.files + file;
  const uint64_t elements =
      std::min(set.stripe_elements, set.elements - last * set.stripe_elements);
  const uint64_t bytes = elements * base::data_type_bytes(static_cast<base::DataType>(set.type));
  return header_bytes + (stripes - 1) * stripe_bytes(set) +
         base::round_up(bytes, base::kIoAlignment);
}

/// Empties the files and takes their space.
Status StripedWeights::reserve(const StripedHeader& set, std::span<File> files) {
  for (File& file : files) {
    file.ours = true;
    if (ftruncate(file.descriptor.get(), 0) != 0) {
      return base::errno_status(errno, "cannot empty the file of weights", file.path);
    }
  }
  for (uint32_t i = 0; i < files.size(); ++i) {
    File& file = files[i];
    file.header_bytes = header_bytes(set, i);
    file.checksums.resize(stripes_of(set, i));
    SI_RETURN_IF_ERROR(storage::reserve_space(file.descriptor.get(),
                                              file_bytes(set, i, file.header_bytes), kForWeights,
                                              file.directory, file.path));
  }
  return Status();
}

Result<std::unique_ptr<StripedWeights>> StripedWeights::create(const Options& options) {
  SI_RETURN_IF_ERROR(check_directories(options.directories));
  StripedHeader set;
  set.magic = kMagic;
  set.version = kVersion;
  set.type = static_cast<uint32_t>(options.type);
  set.set = storage::make_run_id().bytes;
  set.files = static_cast<uint32_t>(options.directories.size());
  set.elements = options.elements;
  set.stripe_elements = options.stripe_bytes / base::data_type_bytes(options.type);
  set.description_bytes = options.description.size();
  if (!possible(set) || stripe_bytes(set) != options.stripe_bytes) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("weights of {} elements in stripes of {} bytes with a description of "
                    "{} bytes",
                    options.elements, options.stripe_bytes, options.description.size()),
        fmt::format("There must be elements, stripes of whole blocks ({} elements), and at "
                    "most {} of description.",
                    base::kBlockElements, base::format_bytes(kDescriptionBytesMax)));
  }
  std::vector<File> files;
  const auto make = [&]() -> Status {
    for (const std::string& directory : options.directories) {
      SI_ASSIGN_OR_RETURN(File file, open_file(directory, /*write=*/true));
      files.push_back(std::move(file));
    }
    return reserve(set, files);
  };
  if (Status status = make(); !status.ok()) {
    for (const File& file : files) {
      if (file.ours) static_cast<void>(unlink(file.path.c_str()));
    }
    return status;
  }
  std::unique_ptr<StripedWeights> made(
      new StripedWeights(std::make_shared<Files>(set, std::move(files)), options.description));
  SI_ASSIGN_OR_RETURN(made->stripe_, base::AlignedBuffer::allocate(options.stripe_bytes));
  return made;
}

Status StripedWeights::read_header(File& file, StripedHeader& header, std::string& description) {
  const int descriptor = file.descriptor.get();
  struct stat info {};
  if (fstat(descriptor, &info) != 0) {
    return base::errno_status(errno, "cannot examine the weights", file.path);
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  constexpr const char* kUnfinished = "the weights were not written to their end";
  if (size < base::kIoAlignment) return damaged(kUnfinished, file.path);
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer area, base::AlignedBuffer::allocate(base::kIoAlignment));
  SI_RETURN_IF_ERROR(transfer(Way::kRead, descriptor, file.path, area.bytes(), 0));
  std::memcpy(&header, area.data(), sizeof(header));
  if (header.magic == std::array<char, 8>{}) return damaged(kUnfinished, file.path);
  if (header.magic != kMagic) return damaged("the file does not hold weights", file.path);
  if (header.version != kVersion) {
    return failed(ErrorCode::kMismatch,
                  fmt::format("the weights have format {}, and this program reads format {}",
                              header.version, kVersion),
                  "Use the version that wrote them, or write them anew.", file.path);
  }
  if (!possible(header)) return damaged("the header of the weights is damaged", file.path);
  file.header_bytes = header_bytes(header, header.file);
  if (size != file_bytes(header, header.file, file.header_bytes)) {
    return damaged(fmt::format("the file of weights has {} bytes and not the {} of its header",
                               size, file_bytes(header, header.file, file.header_bytes)),
                   file.path);
  }
  SI_ASSIGN_OR_RETURN(area, base::AlignedBuffer::allocate(file.header_bytes));
  SI_RETURN_IF_ERROR(transfer(Way::kRead, descriptor, file.path, area.bytes(), 0));
  if (base::checksum(area.bytes().first(file.header_bytes).subspan(kChecksummedFrom)) !=
      header.checksum) {
    return damaged("the header of the weights is damaged", file.path);
  }
  const std::byte* at = area.data() + sizeof(header);
  description.assign(reinterpret_cast<const char*>(at), header.description_bytes);
  file.checksums.resize(stripes_of(header, header.file));
  if (!file.checksums.empty()) {
    std::memcpy(file.checksums.data(), at + header.description_bytes,
                file.checksums.size() * sizeof(uint64_t));
  }
  return Status();
}

Result<std::unique_ptr<StripedWeights>> StripedWeights::open(
    const std::vector<std::string>& directories) {
  const auto has_file = [](const std::string& directory) {
    return access(path_in(directory).c_str(), F_OK) == 0;
  };
  if (std::none_of(directories.begin(), directories.end(), has_file)) {
    return std::unique_ptr<StripedWeights>();
  }
  SI_RETURN_IF_ERROR(check_directories(directories));
  StripedHeader set;
  std::string description;
  std::vector<File> files(directories.size());
  for (const std::string& directory : directories) {
    SI_ASSIGN_OR_RETURN(File file, open_file(directory, /*write=*/false));
    StripedHeader header;
    std::string text;
    SI_RETURN_IF_ERROR(read_header(file, header, text));
    if (&directory == &directories.front()) {
      set = header;
      description = text;
    }
    const bool together = header.set == set.set && header.files == directories.size() &&
                          header.elements == set.elements && header.type == set.type &&
                          header.stripe_elements == set.stripe_elements && text == description &&
                          !files[header.file].descriptor.is_open();
    if (!together) {
      return failed(ErrorCode::kMismatch,
                    fmt::format("the weights in {} do not belong together",
                                directories.size() == 1 ? "this directory and others not named"
                                                        : "these directories"),
                    "Name the directories that they were written to, each once and no others.",
                    file.path);
    }
    files[header.file] = std::move(file);
  }
  std::unique_ptr<StripedWeights> opened(
      new StripedWeights(std::make_shared<Files>(set, std::move(files)), std::move(description)));
  opened->files_->whole = true;
  return opened;
}

Status StripedWeights::remove(const std::vector<std::string>& directories) {
  for (const std::string& directory : directories) {
    const std::string path = path_in(directory);
    if (access(path.c_str(), F_OK) != 0) continue;
    SI_ASSIGN_OR_RETURN(const int opened,
                        base::open_regular_file(path, O_RDWR, "cannot delete the weights"));
    const storage::FileDescriptor descriptor(opened);
    SI_RETURN_IF_ERROR(lock_file(descriptor.get(), /*exclusive=*/true, path));
    if (unlink(path.c_str()) != 0 && errno != ENOENT) {
      return base::errno_status(errno, "cannot delete the weights", path);
    }
  }
  return Status();
}

// ---- Writing.

uint64_t StripedWeights::Files::offset_of(const plan::Subgroup& stripe) const {
  return files[index_of(stripe)].header_bytes + place_of(stripe) * stripe_bytes(set);
}

Status StripedWeights::write(uint64_t first, const void* values, uint64_t count) {
  if (files_->whole)
    return Status(ErrorCode::kFailedPrecondition, "the weights are written already");
  if (!failure_.ok()) return failure_;
  if (first != written_ || count > elements() - first) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("elements [{}, {}) are to be written, where element {} of {} comes next", first,
                    first + count, written_, elements()),
        "Write the elements in ascending order, without gaps.");
  }
  const uint64_t each = base::data_type_bytes(type());
  const auto* in = static_cast<const std::byte*>(values);
  while (count > 0) {
    const plan::Subgroup stripe = subgroup_at(written_);
    const uint64_t within = written_ - stripe.first;
    const uint64_t here = std::min(count, stripe.count - within);
    std::memcpy(stripe_.data() + within * each, in, here * each);
    written_ += here;
    count -= here;
    in += here * each;
    if (within + here < stripe.count) continue;
    failure_ = write_stripe(stripe);
    if (!failure_.ok()) return failure_;
  }
  return Status();
}

Status StripedWeights::write_stripe(const plan::Subgroup& stripe) {
  File& file = files_->files[files_->index_of(stripe)];
  const uint64_t bytes = stripe.count * base::data_type_bytes(type());
  const uint64_t padded = base::round_up(bytes, base::kIoAlignment);
  std::memset(stripe_.data() + bytes, 0, padded - bytes);
  file.checksums[files_->place_of(stripe)] = base::checksum(stripe_.bytes().first(bytes));
  return transfer(Way::kWrite, file.descriptor.get(), file.path, stripe_.bytes().first(padded),
                  files_->offset_of(stripe));
}

Status StripedWeights::write_header(uint32_t index) {
  File& file = files_->files[index];
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer area,
                      base::AlignedBuffer::allocate(file.header_bytes));
  const std::span<std::byte> bytes = area.bytes().first(file.header_bytes);
  StripedHeader header = files_->set;
  header.file = index;
  std::byte* at = bytes.data() + sizeof(header);
  std::memcpy(at, description_.data(), description_.size());
  if (!file.checksums.empty()) {  // fewer stripes than files
    std::memcpy(at + description_.size(), file.checksums.data(),
                file.checksums.size() * sizeof(uint64_t));
  }
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.checksum = base::checksum(bytes.subspan(kChecksummedFrom));
  std::memcpy(bytes.data(), &header, sizeof(header));
  return transfer(Way::kWrite, file.descriptor.get(), file.path, bytes, 0);
}

Status StripedWeights::finish() {
  if (files_->whole)
    return Status(ErrorCode::kFailedPrecondition, "the weights are written already");
  if (!failure_.ok()) return failure_;
  if (written_ < elements()) {
    return Status(ErrorCode::kFailedPrecondition,
                  fmt::format("{} of {} elements were written", written_, elements()),
                  "Write all of them before finish().");
  }
  const auto sync = [](const File& file) {
    if (fsync(file.descriptor.get()) == 0) return Status();
    return base::errno_status(errno, "cannot make the weights durable", file.path);
  };
  const auto finish_all = [&]() -> Status {
    for (const File& file : files_->files) SI_RETURN_IF_ERROR(sync(file));
    for (uint32_t i = 0; i < files_->files.size(); ++i) SI_RETURN_IF_ERROR(write_header(i));
    for (const File& file : files_->files) {
      SI_RETURN_IF_ERROR(sync(file));
      SI_RETURN_IF_ERROR(storage::sync_directory(file.directory));
      SI_RETURN_IF_ERROR(lock_file(file.descriptor.get(), /*exclusive=*/false, file.path));
    }
    return Status();
  };
  failure_ = finish_all();
  files_->whole = failure_.ok();
  stripe_ = base::AlignedBuffer();
  return failure_;
}

// ---- Reading.

Status StripedWeights::Files::read(const plan::Subgroup& stripe, base::DataType wanted,
                                   std::byte* out) const {
  if (!whole) {
    return Status(ErrorCode::kFailedPrecondition, "the weights are not written yet",
                  "Call finish() first.");
  }
  const File& file = files[index_of(stripe)];
  const uint64_t each = base::data_type_bytes(type);
  const uint64_t bytes = stripe.count * each;
  const bool straight =
      wanted == type && (bytes | reinterpret_cast<uintptr_t>(out)) % base::kIoAlignment == 0;
  base::AlignedBuffer buffer;
  std::span<std::byte> into(out, bytes);
  if (!straight) {
    SI_ASSIGN_OR_RETURN(buffer, base::AlignedBuffer::allocate(bytes));
    into = buffer.bytes();
  }
  const uint64_t offset = offset_of(stripe);
  SI_RETURN_IF_ERROR(transfer(Way::kRead, file.descriptor.get(), file.path, into, offset));
  if (base::checksum(into.first(bytes)) != file.checksums[place_of(stripe)]) {
    Status status = damaged("the checksum of the weights is wrong", file.path);
    return Status(status.code(), status.what(), status.advice(),
                  base::ErrorPlace{file.path, offset, bytes, 0});
  }
  if (straight) return Status();
  if (wanted == type) {
    std::memcpy(out, into.data(), bytes);
    return Status();
  }
  std::vector<float> piece(std::min(stripe.count, base::kBlockElements));
  for (uint64_t done = 0; done < stripe.count; done += piece.size()) {
    const uint64_t here = std::min<uint64_t>(piece.size(), stripe.count - done);
    kernels::kernels().cast_to_f32(into.data() + done * each, type, piece.data(), here);
    kernels::kernels().cast_from_f32(piece.data(), out + done * base::data_type_bytes(wanted),
                                     wanted, here);
  }
  return Status();
}

}  // namespace smartinf::engine
