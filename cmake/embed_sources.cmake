# Script: writes OUTPUT, a C++ file that defines jit::embedded_sources() with the text of every file in SOURCES. The texts
# are literals of std::string_view: a compiler that has to count a megabyte of characters gives up.
set(text "#include \"kernel_pytorch/jit/sources.h\"\n\nnamespace kernel_pytorch::jit {\n\nstd::span<const EmbeddedSource> embedded_sources() {\n  using namespace std::string_view_literals;\n  static constexpr EmbeddedSource kSources[] = {\n")
foreach(source IN LISTS SOURCES)
  file(READ ${ROOT}/${source} content)
  string(APPEND text "      {\"${source}\", R\"KP_SOURCE(${content})KP_SOURCE\"sv},\n")
endforeach()
string(APPEND text "  };\n  return kSources;\n}\n\n}  // namespace kernel_pytorch::jit\n")
file(WRITE ${OUTPUT} "${text}")
