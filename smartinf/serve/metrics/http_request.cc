#include "smartinf/serve/metrics/http_request.h"

#include <algorithm>

#include <fmt/format.h>

namespace smartinf::serve {
namespace {

std::string_view reason(uint32_t code) {
  switch (code) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 431:
      return "Request Header Fields Too Large";
    default:
      return "Service Unavailable";
  }
}

bool visible(char c) { return c > ' ' && c < '\x7f'; }

}  // namespace

HttpRequest parse_http_request(std::string_view bytes) {
  HttpRequest request;
  const size_t end = bytes.find("\r\n");
  const std::string_view line = bytes.substr(0, end);
  // What is no request, a TLS handshake for example, is seen at its first bytes.
  const auto wrong = std::ranges::find_if(line, [](char c) { return !visible(c) && c != ' '; });
  if (wrong != line.end() && !(*wrong == '\r' && wrong + 1 == line.end())) {
    request.state = HttpRequest::State::kMalformed;
    return request;
  }
  if (end == std::string_view::npos) return request;

  const size_t first = line.find(' ');
  const size_t second = line.find(' ', first + 1);
  if (first == std::string_view::npos || second == std::string_view::npos || first == 0 ||
      line.find(' ', second + 1) != std::string_view::npos || line[first + 1] != '/' ||
      (line.substr(second + 1) != "HTTP/1.1" && line.substr(second + 1) != "HTTP/1.0")) {
    request.state = HttpRequest::State::kMalformed;
    return request;
  }
  if (bytes.find("\r\n\r\n", end) == std::string_view::npos) return request;
  request.state = HttpRequest::State::kComplete;
  request.method = line.substr(0, first);
  request.path = line.substr(first + 1, second - first - 1);
  request.path = request.path.substr(0, request.path.find('?'));
  return request;
}

std::string http_response(uint32_t code, std::string_view content_type, std::string_view body,
                          bool with_body) {
  return fmt::format(
      "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}"
      "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n{}",
      code, reason(code), content_type, body.size(), code == 405 ? "Allow: GET, HEAD\r\n" : "",
      with_body ? body : std::string_view());
}

}  // namespace smartinf::serve
