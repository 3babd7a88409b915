// Whose files a cache may use. A cache holds code that is run and choices that are obeyed, so its folders and files
// must be this user's (or root's, who can change anything anyway) and not writable by others.
#pragma once

#include <string>

#include "kernel_pytorch/base/export.h"

struct stat;

namespace kernel_pytorch {

// Why the folder or file must not be used, and the cure; empty where it may be, or where nothing is there yet. A
// symbolic link counts by its own owner and by what it leads to; one that leads nowhere must not be used.
KP_EXPORT std::string reason_not_private(const std::string& path);
// The same for an open file, so that it cannot be replaced between the check and the read.
KP_EXPORT std::string reason_not_private(const std::string& path, const struct stat& facts);

// Makes the folder and those above it, each with mode 0700; the caller finds out by using it.
KP_EXPORT void make_private_folders(const std::string& path);

// Makes an empty file of mode 0600 where there is none, without following a link, and takes other users' access from
// one that is this user's.
KP_EXPORT void make_private_file(const std::string& path);

}  // namespace kernel_pytorch
