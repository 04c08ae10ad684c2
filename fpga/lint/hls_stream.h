// Streams as names only, for lint.py: what else a kernel refers to is then its own.
#pragma once

namespace hls {

template <typename T, int kDepth = 0>
class stream;

template <typename T>
class stream<T, 0> {
 public:
  explicit stream(const char* name = "");
  T read();
  void write(const T& value);
  bool empty() const;
};

template <typename T, int kDepth>
class stream : public stream<T, 0> {
 public:
  explicit stream(const char* name = "");
};

}  // namespace hls
