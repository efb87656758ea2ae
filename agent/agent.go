// Package agent is the service of a host with GPUs. [Serve] advertises them to the kubelet; [Watch] keeps their CDI
// spec up to date on a host without a kubelet.
//
// Both build the service from the bottom up: the node reads the driver, devices and runner prepare GPUs for
// containers, the plugin answers the kubelet, and the publisher passes each state of the node to the plugin, the
// metrics and the API server. Each part knows only the parts before it.
//
// The package knows no flags, verbs or exit statuses, and loads the driver's library only through [Driver].
package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// ErrRestart means that the configuration has changed in a way that needs a new process.
var ErrRestart = errors.New("the configuration has changed")

// NeedsRestart reports whether Serve or Watch has ended with an error after which the process must start its program
// again, in its own place.
func NeedsRestart(err error) bool {
	return errors.Is(err, ErrRestart) || errors.Is(err, node.ErrDriverChanged)
}

// Options are the parameters of Serve and Watch. All are required.
type Options struct {
	// Config is the effective configuration.
	Config config.Config
	// Host has the paths of the host's files, HookPath is the path of the hook on the host, and SpecDirs are the CDI
	// directories, from the lowest priority to the highest.
	Host     host.Host
	HookPath string
	SpecDirs []string
	// Driver is closed before the service ends. PollInterval is the time between two polls of the driver.
	Driver       Driver
	PollInterval time.Duration
	// LogSlowCalls logs the driver calls that have not returned when the timer fires.
	LogSlowCalls func() *time.Timer
	Trust        Trust
	Build        metrics.BuildInfo
	// Env has the variables that systemd sets (NOTIFY_SOCKET, ...) and those of Kubernetes (NODE_NAME, ...).
	Env []string
	Log *slog.Logger
	// Reload receives a value when the configuration must be read again. Reread reads it; only Config and Trust of the
	// options that it returns differ from these.
	Reload <-chan os.Signal
	Reread func() (*Options, error)
	// Hint returns what an administrator can do about an error, or "".
	Hint func(error) string
}

// Driver is the driver of the host. nvml.Session implements it.
type Driver interface {
	node.Source
	node.Prober
	prepare.Driver
	mps.ComputeModes
	// Open opens the driver's library. It need not be called: the other methods open the library too.
	Open(ctx context.Context) error
	// Close closes the driver's library. CloseIdle does if nothing uses a GPU, and reports whether it has.
	Close() error
	CloseIdle(ctx context.Context) bool
}

// Trust checks that only root can change what the service runs, loads or writes to. Its errors are complete sentences.
type Trust interface {
	// CheckHook checks the hook of the configuration.
	CheckHook() error
	// CheckProgram checks a program that is run as root.
	CheckProgram(path string) error
	// CheckDir checks a directory. In the error it has the name of its option.
	CheckDir(option, path string) error
}

// role has what Serve and Watch do differently.
type role interface {
	// publish passes on a state of the node. When it returns, no device that is missing in the state can be allocated.
	publish(state node.State)
	// check returns why a configuration cannot be used. It is called at the start and at each reload.
	check(fresh *Options) error
	// offer returns which devices a configuration offers.
	offer(c *config.Config) resource.Config
	// use replaces the configuration, if needsRestart says that this needs no new process.
	use(c *config.Config)
	// ready returns why the service is not ready, apart from problems of the node.
	ready() error
	// summary describes the role's state in a few words.
	summary() []string
	// remarks are what an administrator should know, besides the remarks of the node.
	remarks() []node.Remark
	// keepOpen waits for a limited time until no device is being prepared, and keeps the driver open from then on, for a
	// restart. If the driver is closed, keepOpen only returns a channel
	// that is closed when it is open again, and a text that says what opens it.
	keepOpen(ctx context.Context) (until string, opened <-chan struct{})
	// run runs the role's actors, and the actor of the node, after the first state of the node. Then it unlocks the
	// node's files.
	run(ctx context.Context, node actor) error
}

// actor runs until its context ends or it cannot continue.
type actor = func(context.Context) error
