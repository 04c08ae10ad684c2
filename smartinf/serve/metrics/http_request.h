// As much of HTTP/1.1 as two pages to read need: the first line of a request counts, its headers
// are skipped, a body is refused.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace smartinf::serve {

struct HttpRequest {
  enum class State : uint8_t {
    kIncomplete,  // more must come
    kComplete,
    kMalformed,
  };
  State state = State::kIncomplete;
  std::string_view method;  // into the bytes that were parsed
  std::string_view path;    // without what follows a '?'
};

/// Of all bytes that came so far.
HttpRequest parse_http_request(std::string_view bytes);

/// A whole response that ends the connection. with_body: false after HEAD.
std::string http_response(uint32_t code, std::string_view content_type, std::string_view body,
                          bool with_body = true);

}  // namespace smartinf::serve
