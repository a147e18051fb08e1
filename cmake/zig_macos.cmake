# Compiles and links for macOS on any system, with the headers and libraries that zig brings.
# ZIG: the program; MACOS_PROCESSOR: arm64 or x86_64.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG MACOS_PROCESSOR)
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR ${MACOS_PROCESSOR})
if(MACOS_PROCESSOR STREQUAL "arm64")
  set(zig_target aarch64-macos.11.0)
else()
  set(zig_target x86_64-macos.11.0)
endif()
set(CMAKE_CXX_COMPILER ${ZIG} c++ -target ${zig_target})
set(CMAKE_AR ${ZIG})
set(CMAKE_RANLIB ${ZIG})
set(CMAKE_STRIP ${CMAKE_COMMAND} -E true)  # the strip of Linux does not know the files
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "<CMAKE_AR> ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "<CMAKE_RANLIB> ranlib <TARGET>")
# zig knows the target already, and finds its own headers.
set(CMAKE_OSX_SYSROOT "" CACHE STRING "" FORCE)
set(CMAKE_OSX_DEPLOYMENT_TARGET "" CACHE STRING "" FORCE)
set(CMAKE_OSX_ARCHITECTURES "" CACHE STRING "" FORCE)
