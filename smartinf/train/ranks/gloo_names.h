// Names of gloo's that torch's header of its process group over gloo (ProcessGroupGloo.hpp) uses.
// The PyTorch wheel has gloo within its library, but not gloo's headers. Behind pointers alone, and
// never made or called here: what these declarations say of a class changes nothing. CMake puts
// this file where the header looks for gloo's own (cmake/torch.cmake).
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;
class UnboundBuffer;
}  // namespace transport

namespace rendezvous {
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
};
}  // namespace rendezvous

}  // namespace gloo
