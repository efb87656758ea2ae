// Package drivers tests the product with the user space of real NVIDIA drivers, as Debian packages it, on a machine
// without a GPU. For each driver it makes a root: a small Debian with the driver's packages. There the driver's library
// answers that the kernel module is not loaded, and the real MPS control daemon runs. With the device nodes, /proc,
// /sys and libnvidia-ml of a simulated node, the root is a node whose containers get the driver's real files.
//
// The packages are downloaded, and kept in the user's cache directory. None of their files is in this tree, only lists
// of their names. A driver that the archive no longer has, or a version of it that is new there, is no failure: the log
// says it.
package drivers

import (
	"flag"
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
)

var (
	branches = flag.String("drivers", "535,550", "comma-separated branches of the driver to test, or all")
	update   = flag.Bool("write-files", false, "write the lists of files of the drivers' versions")
	shared   *suite.Suite
)

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }
