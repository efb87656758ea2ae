// Package simtest makes simulated nodes for tests.
package simtest

import (
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Option is an option of a node.
type Option func(*sim.Options)

// Driver sets the driver's version.
func Driver(version string) Option { return func(o *sim.Options) { o.Driver = version } }

// LibDir sets the directory of the libraries, relative to the node's root.
func LibDir(dir string) Option { return func(o *sim.Options) { o.LibDir = dir } }

// Extras adds devices besides GPUs, by the names that sim.Extras returns.
func Extras(names ...string) Option { return func(o *sim.Options) { o.Extras = names } }

// PlainNodes creates regular files instead of device nodes. Without it the test needs root.
func PlainNodes() Option { return func(o *sim.Options) { o.PlainNodes = true } }

// Node creates a node in the test's temporary directory. Without PlainNodes the test needs root.
func Node(t testing.TB, machine string, options ...Option) *sim.Node {
	t.Helper()
	var opts sim.Options
	for _, o := range options {
		o(&opts)
	}
	if !opts.PlainNodes {
		testenv.Root(t)
	}
	testenv.Command(t, "cc")
	m, err := sim.LoadMachine(machine)
	testenv.Must(t, err)
	n, err := sim.Create(t.Context(), filepath.Join(t.TempDir(), "node"), m, opts)
	testenv.Must(t, err)
	return n
}
