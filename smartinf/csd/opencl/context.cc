#include "smartinf/csd/opencl/context.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <vector>

#include "smartinf/base/units.h"

namespace smartinf::csd {
namespace opencl {
namespace {

using base::ErrorCode;
using base::Status;

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string platform_text(cl_platform_id platform, cl_platform_info what) {
  size_t bytes = 0;
  if (clGetPlatformInfo(platform, what, 0, nullptr, &bytes) != CL_SUCCESS || bytes == 0) return {};
  std::string text(bytes, '\0');
  clGetPlatformInfo(platform, what, bytes, text.data(), nullptr);
  return text.c_str();
}
std::string device_text(cl_device_id device, cl_device_info what) {
  size_t bytes = 0;
  if (clGetDeviceInfo(device, what, 0, nullptr, &bytes) != CL_SUCCESS || bytes == 0) return {};
  std::string text(bytes, '\0');
  clGetDeviceInfo(device, what, bytes, text.data(), nullptr);
  return text.c_str();
}
template <typename T>
T device_value(cl_device_id device, cl_device_info what) {
  T value{};
  clGetDeviceInfo(device, what, sizeof(value), &value, nullptr);
  return value;
}

struct Found {
  cl_platform_id platform;
  cl_device_id device;
  OpenClDevice info;
};

/// Xilinx' runtime can put buffers where a drive's DMA reaches them.
bool offers_peer(cl_platform_id platform, cl_device_id device) {
  if (platform_text(platform, CL_PLATFORM_NAME).find("Xilinx") == std::string::npos) return false;
  return device_value<cl_device_type>(device, CL_DEVICE_TYPE) == CL_DEVICE_TYPE_ACCELERATOR;
}

std::vector<Found> find_devices() {
  std::vector<Found> found;
  cl_uint platforms = 0;
  if (clGetPlatformIDs(0, nullptr, &platforms) != CL_SUCCESS) return found;
  std::vector<cl_platform_id> ids(platforms);
  clGetPlatformIDs(platforms, ids.data(), nullptr);
  for (const cl_platform_id platform : ids) {
    cl_uint devices = 0;
    if (clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &devices) != CL_SUCCESS) continue;
    std::vector<cl_device_id> of_platform(devices);
    clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, devices, of_platform.data(), nullptr);
    for (const cl_device_id device : of_platform) {
      OpenClDevice info;
      info.name =
          platform_text(platform, CL_PLATFORM_NAME) + ": " + device_text(device, CL_DEVICE_NAME);
      info.driver =
          device_text(device, CL_DEVICE_VERSION) + ", " + device_text(device, CL_DRIVER_VERSION);
      info.cpu = (device_value<cl_device_type>(device, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_CPU) != 0;
      info.shares_memory = device_value<cl_bool>(device, CL_DEVICE_HOST_UNIFIED_MEMORY) == CL_TRUE;
      info.peer = offers_peer(platform, device);
      found.push_back({platform, device, std::move(info)});
    }
  }
  return found;
}

base::Result<Found> choose(const OpenClOptions& options) {
  const std::string& wanted = options.device;
  const std::vector<Found> all = find_devices();
  if (all.empty() || (options.fault && options.fault("clGetPlatformIDs") != CL_SUCCESS)) {
    return Status(ErrorCode::kNotFound, "there is no OpenCL platform with a device",
                  "Install the driver of the device (on Debian pocl-opencl-icd for this machine's "
                  "cores); /etc/OpenCL/vendors lists what is installed.");
  }
  std::string names;
  for (size_t i = 0; i < all.size(); ++i) {
    names += (i > 0 ? ", " : "") + std::to_string(i) + ": \"" + all[i].info.name + "\"";
  }
  if (wanted.empty()) return all.front();
  size_t number = 0;
  const auto [end, error] = std::from_chars(wanted.data(), wanted.data() + wanted.size(), number);
  if (error == std::errc() && end == wanted.data() + wanted.size() && number < all.size()) {
    return all[number];
  }
  const std::string part = lower(wanted);
  for (const Found& found : all) {
    if (lower(found.info.name).find(part) != std::string::npos) return found;
  }
  return Status(ErrorCode::kNotFound, "there is no OpenCL device \"" + wanted + "\"",
                "By number and name there are: " + names + ".");
}

/// Checks abilities that the arithmetic needs and not every device has.
Status check_abilities(const Found& found) {
  const auto lacks = [&](const std::string& what) {
    return Status(ErrorCode::kUnsupported,
                  "the OpenCL device \"" + found.info.name + "\" has no " + what,
                  "Its bits would differ from those of other devices: use processor = \"cpu\".");
  };
  const auto floats = device_value<cl_device_fp_config>(found.device, CL_DEVICE_SINGLE_FP_CONFIG);
  if ((floats & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT) == 0) {
    return lacks("correctly rounded division and square root in f32");
  }
  if ((floats & CL_FP_DENORM) == 0) return lacks("denormals in f32");
  if ((floats & CL_FP_INF_NAN) == 0) return lacks("infinities and NaN in f32");
  if (device_value<cl_bool>(found.device, CL_DEVICE_ENDIAN_LITTLE) != CL_TRUE) {
    return lacks("little-endian numbers");
  }
  if (device_value<cl_bool>(found.device, CL_DEVICE_COMPILER_AVAILABLE) != CL_TRUE) {
    return lacks("compiler");
  }
  return Status();
}

}  // namespace

std::string error_name(cl_int error) {
  switch (error) {
    case CL_DEVICE_NOT_FOUND:
      return "CL_DEVICE_NOT_FOUND";
    case CL_DEVICE_NOT_AVAILABLE:
      return "CL_DEVICE_NOT_AVAILABLE";
    case CL_COMPILER_NOT_AVAILABLE:
      return "CL_COMPILER_NOT_AVAILABLE";
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
      return "CL_MEM_OBJECT_ALLOCATION_FAILURE";
    case CL_OUT_OF_RESOURCES:
      return "CL_OUT_OF_RESOURCES";
    case CL_OUT_OF_HOST_MEMORY:
      return "CL_OUT_OF_HOST_MEMORY";
    case CL_BUILD_PROGRAM_FAILURE:
      return "CL_BUILD_PROGRAM_FAILURE";
    case CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST:
      return "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST";
    case CL_INVALID_BUFFER_SIZE:
      return "CL_INVALID_BUFFER_SIZE";
    case CL_INVALID_COMMAND_QUEUE:
      return "CL_INVALID_COMMAND_QUEUE";
    case CL_INVALID_WORK_GROUP_SIZE:
      return "CL_INVALID_WORK_GROUP_SIZE";
    default:
      return "OpenCL error " + std::to_string(error);
  }
}

Status Device::failed(std::string_view call, cl_int error) const {
  const std::string what = "the OpenCL device \"" + info.name + "\" answered " + std::string(call) +
                           " with " + error_name(error);
  if (error == CL_MEM_OBJECT_ALLOCATION_FAILURE || error == CL_OUT_OF_RESOURCES ||
      error == CL_OUT_OF_HOST_MEMORY || error == CL_INVALID_BUFFER_SIZE) {
    return Status(ErrorCode::kOutOfMemory, what,
                  "Lower engine.memory_budget or make subgroups smaller, or close what else uses "
                  "the device.");
  }
  return Status(ErrorCode::kIo, what,
                "The state on the drive is that of the last committed step. If the device is gone, "
                "processor = \"cpu\" goes on from there.");
}

base::Result<Buffer> Device::buffer(uint64_t bytes, cl_mem_flags flags, void* host) const {
  return make<Buffer>("clCreateBuffer", [&](cl_int* error) {
    return clCreateBuffer(context.get(), flags, std::max<uint64_t>(bytes, 1), host, error);
  });
}

base::Result<std::unique_ptr<Device>> open_device(const OpenClOptions& options) {
  auto device = std::make_unique<Device>();
  device->options = options;
  SI_ASSIGN_OR_RETURN(Found found, choose(options));
  SI_RETURN_IF_ERROR(check_abilities(found));
  device->info = found.info;
  device->platform = found.platform;
  device->id = found.device;
  device->compute_units = device_value<cl_uint>(found.device, CL_DEVICE_MAX_COMPUTE_UNITS);
  const bool peer = found.info.peer || options.pretend_peer;
  device->memory = options.memory;
  if (options.memory == OpenClMemory::kAuto) {
    device->memory = peer                       ? OpenClMemory::kPeer
                     : found.info.shares_memory ? OpenClMemory::kShared
                                                : OpenClMemory::kCopied;
  } else if (options.memory == OpenClMemory::kPeer && !peer) {
    return Status(ErrorCode::kUnsupported, "the OpenCL device \"" + found.info.name +
                                               "\" offers no memory that drives can reach");
  }
  SI_ASSIGN_OR_RETURN(device->context, device->make<Context>("clCreateContext", [&](cl_int* error) {
    const cl_context_properties properties[] = {
        CL_CONTEXT_PLATFORM, reinterpret_cast<cl_context_properties>(found.platform), 0};
    return clCreateContext(properties, 1, &found.device, nullptr, nullptr, error);
  }));
  const auto able =
      device_value<cl_command_queue_properties>(found.device, CL_DEVICE_QUEUE_PROPERTIES);
  const auto queue = [&](cl_command_queue_properties properties) {
    return device->make<Queue>("clCreateCommandQueue", [&](cl_int* error) {
      return clCreateCommandQueue(device->context.get(), found.device, properties, error);
    });
  };
  SI_ASSIGN_OR_RETURN(device->in, queue(0));
  SI_ASSIGN_OR_RETURN(device->compute, queue(able & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE));
  SI_ASSIGN_OR_RETURN(device->out, queue(0));
  return device;
}

}  // namespace opencl

base::Result<std::vector<OpenClDevice>> opencl_devices() {
  std::vector<OpenClDevice> devices;
  for (opencl::Found& found : opencl::find_devices()) devices.push_back(std::move(found.info));
  return devices;
}

}  // namespace smartinf::csd
