#include "smartinf/csd/opencl/programs.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include <unistd.h>

#include "smartinf/base/checksum.h"
#include "smartinf/csd/opencl/program_text.h"

namespace smartinf::csd::opencl {
namespace {

using base::ErrorCode;
using base::Status;

/// In front of a cached program. A file that is damaged or of another version is built anew.
struct CacheHeader {
  uint64_t magic = 0x31474f5250434953;  // "SICPROG1"
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::filesystem::path cache_folder(const OpenClOptions& options) {
  if (!options.cache_folder.empty()) return options.cache_folder;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg != '\0') {
    return std::filesystem::path(xdg) / "smartinf" / "opencl";
  }
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0') return {};
  return std::filesystem::path(home) / ".cache" / "smartinf" / "opencl";
}

/// Everything that decides what the compiler makes.
std::string cache_name(const Device& device, const std::string& text, const std::string& options) {
  const std::string all =
      device.info.name + '\0' + device.info.driver + '\0' + options + '\0' + text;
  std::array<char, 33> name{};
  std::snprintf(name.data(), name.size(), "%016llx%016llx",
                static_cast<unsigned long long>(base::checksum(bytes_of(all), 1)),
                static_cast<unsigned long long>(base::checksum(bytes_of(all), 2)));
  return name.data();
}

std::optional<std::string> read_cached(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::stringstream content;
  content << file.rdbuf();
  std::string all = std::move(content).str();
  CacheHeader header;
  const CacheHeader wanted;
  if (all.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, all.data(), sizeof(header));
  all.erase(0, sizeof(header));
  if (header.magic != wanted.magic || header.bytes != all.size() ||
      header.checksum != base::checksum(bytes_of(all))) {
    return std::nullopt;
  }
  return all;
}

/// Whole or not at all: other processes read it. What cannot be kept is built again another time.
void write_cached(const std::filesystem::path& path, const std::string& binary) {
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  std::filesystem::path own = path;
  own += ".";
  own += std::to_string(::getpid());
  CacheHeader header;
  header.bytes = binary.size();
  header.checksum = base::checksum(bytes_of(binary));
  {
    std::ofstream file(own, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(&header), sizeof(header));
    file.write(binary.data(), static_cast<std::streamsize>(binary.size()));
    if (!file) {
      std::filesystem::remove(own, ignored);
      return;
    }
  }
  std::filesystem::rename(own, path, ignored);
  if (ignored) std::filesystem::remove(own, ignored);
}

std::string binary_of(const Program& program) {
  size_t bytes = 0;
  if (clGetProgramInfo(program.get(), CL_PROGRAM_BINARY_SIZES, sizeof(bytes), &bytes, nullptr) !=
      CL_SUCCESS) {
    return {};
  }
  std::string binary(bytes, '\0');
  auto* data = reinterpret_cast<unsigned char*>(binary.data());
  if (bytes == 0 || clGetProgramInfo(program.get(), CL_PROGRAM_BINARIES, sizeof(data), &data,
                                     nullptr) != CL_SUCCESS) {
    return {};
  }
  return binary;
}

/// The first lines of the compiler's log.
std::string log_of(const Device& device, const Program& program) {
  size_t bytes = 0;
  clGetProgramBuildInfo(program.get(), device.id, CL_PROGRAM_BUILD_LOG, 0, nullptr, &bytes);
  std::string log(bytes, '\0');
  clGetProgramBuildInfo(program.get(), device.id, CL_PROGRAM_BUILD_LOG, bytes, log.data(), nullptr);
  std::istringstream lines{log.c_str()};
  std::string first;
  std::string line;
  for (int i = 0; i < 6 && std::getline(lines, line); ++i) first += "\n  " + line;
  return first;
}

}  // namespace

base::Result<Program> Programs::from_source(const std::string& text,
                                            const std::string& options) const {
  const char* source = text.c_str();
  SI_ASSIGN_OR_RETURN(
      Program program, device_.make<Program>("clCreateProgramWithSource", [&](cl_int* error) {
        return clCreateProgramWithSource(device_.context.get(), 1, &source, nullptr, error);
      }));
  const Status built = device_.run("clBuildProgram", [&] {
    return clBuildProgram(program.get(), 1, &device_.id, options.c_str(), nullptr, nullptr);
  });
  if (built.ok()) return program;
  return Status(ErrorCode::kUnsupported,
                "the OpenCL device \"" + device_.info.name +
                    "\" does not compile smartinf's kernels: " + built.what() +
                    log_of(device_, program),
                "Its driver may be too old: use processor = \"cpu\", and report the log.");
}

base::Result<Program> Programs::build(const std::string& text,
                                      const std::string& own_options) const {
  const std::string options =
      std::string(kOptions) + own_options + device_.options.compiler_options;
  const std::filesystem::path folder = cache_folder(device_.options);
  if (folder.empty()) return from_source(text, options);
  const std::filesystem::path path = folder / cache_name(device_, text, options);
  if (const std::optional<std::string> cached = read_cached(path)) {
    const auto* data = reinterpret_cast<const unsigned char*>(cached->data());
    const size_t bytes = cached->size();
    cl_int loaded = CL_SUCCESS;
    cl_int error = CL_SUCCESS;
    Program program(clCreateProgramWithBinary(device_.context.get(), 1, &device_.id, &bytes, &data,
                                              &loaded, &error));
    if (error == CL_SUCCESS && loaded == CL_SUCCESS &&
        clBuildProgram(program.get(), 1, &device_.id, options.c_str(), nullptr, nullptr) ==
            CL_SUCCESS) {
      return program;
    }
  }
  SI_ASSIGN_OR_RETURN(Program program, from_source(text, options));
  if (const std::string binary = binary_of(program); !binary.empty()) write_cached(path, binary);
  return program;
}

base::Result<cl_kernel> Programs::update(const UpdateKind& kind) {
  Kernel& kept = updates_[kind];
  if (!kept) {
    const auto define = [](const char* name, auto value) {
      return std::string(" -D") + name + "=" + std::to_string(static_cast<uint32_t>(value));
    };
    const auto encoding = [&](base::PlaneKind plane) {
      return base::plane_encoding(kind.format, plane);
    };
    const std::string options =
        define("SI_RULE", kind.rule) + define("SI_MASTER", encoding(base::PlaneKind::kMaster)) +
        define("SI_MOMENTS", encoding(base::PlaneKind::kMomentum)) +
        define("SI_GRADIENT", kind.gradient) + define("SI_WEIGHTS", kind.weights);
    SI_ASSIGN_OR_RETURN(const Program program,
                        build(std::string(kCommonText) + kUpdateText, options));
    SI_ASSIGN_OR_RETURN(Kernel kernel, device_.make<Kernel>("clCreateKernel", [&](cl_int* error) {
      return clCreateKernel(program.get(), "update", error);
    }));
    SI_RETURN_IF_ERROR(test(kind, kernel.get()));
    kept = std::move(kernel);
  }
  return kept.get();
}

base::Result<Kernel> Programs::fold() const {
  const std::string options;
  SI_ASSIGN_OR_RETURN(const Program program, build(std::string(kCommonText) + kFoldText, options));
  return device_.make<Kernel>("clCreateKernel", [&](cl_int* error) {
    return clCreateKernel(program.get(), "fold", error);
  });
}

base::Result<const PlaneKernels*> Programs::planes() {
  if (planes_ == nullptr) {
    const std::string options;
    SI_ASSIGN_OR_RETURN(const Program program,
                        build(std::string(kCommonText) + kPlanesText, options));
    const auto kernel = [&](const char* name) {
      return device_.make<Kernel>("clCreateKernel", [&](cl_int* error) {
        return clCreateKernel(program.get(), name, error);
      });
    };
    auto made = std::make_unique<PlaneKernels>();
    SI_ASSIGN_OR_RETURN(made->decode, kernel("decode"));
    SI_ASSIGN_OR_RETURN(made->encode, kernel("encode"));
    SI_ASSIGN_OR_RETURN(made->cast, kernel("cast"));
    planes_ = std::move(made);
  }
  return planes_.get();
}

}  // namespace smartinf::csd::opencl
