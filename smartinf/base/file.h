// Small files that are read and written whole, with care for what may stand at their place: a FIFO
// that never answers, a link that leads elsewhere, a crash in the middle of writing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "smartinf/base/status.h"

namespace smartinf::base {

/// Opens what must be a regular file, with open(2)'s flags and O_CLOEXEC. The descriptor is the
/// caller's. Never waits: a FIFO is refused. Errors: as errno says, with `what` ("cannot read the
/// recipe") and the path; kInvalidArgument for a folder, FIFO, socket or device node.
Result<int> open_regular_file(const std::string& path, int flags, std::string_view what);

/// The contents of a regular file. Errors: the above; kInvalidArgument when it is longer than
/// bytes_max.
Result<std::string> read_text_file(const std::string& path, std::string_view what,
                                   uint64_t bytes_max = uint64_t{1} << 30);

/// Replaces a file's contents: writes a file of its own beside it, makes it durable, renames it. A
/// crash leaves the old contents or the new ones. Follows no link that somebody has put in the way.
/// mode: of the file from its first moment, less the process's umask. Errors: as errno says, with
/// `what` and the path.
Status write_text_file(const std::string& path, std::string_view text, std::string_view what,
                       uint32_t mode = 0666);

}  // namespace smartinf::base
