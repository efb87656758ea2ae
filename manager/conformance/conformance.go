// Package conformance checks a device plugin against the rules of the device plugin API v1beta1: the rules in the API's
// definition, and those that follow from what the kubelet does.
//
//	report, err := conformance.Run(ctx, conformance.Options{Command: []string{"plugin", "--dir={dir}"}})
//	fmt.Println(report.Failed)
//
// The package acts as a kubelet: it serves kubelet.sock in a directory in which the plugin registers, and then makes
// the calls of a kubelet, including those that a kubelet makes when something is wrong. Messages are checked as they
// arrive. Do not run it while a kubelet uses the same directory, or while containers use the plugin's devices.
package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"gpu-cdi-plugin/internal/wording"
)

var (
	// ErrInUse means that a kubelet or another device manager serves the directory.
	ErrInUse = errors.New("a kubelet or another device manager serves this directory")
	// ErrOptions means that options contradict each other, or that they do not say which plugin to check.
	ErrOptions = errors.New("want a socket, a command or a directory of the kubelet")
	// ErrNotStarted means that the plugin's command cannot be started.
	ErrNotStarted = errors.New("the plugin cannot be started")
)

// DefaultTimeout is how long a plugin may take for each step.
const DefaultTimeout = 10 * time.Second

// Options say which plugin is checked, and how. One of Socket, Command and KubeletDir must be set, and Command and
// KubeletDir may be set together.
type Options struct {
	// Socket is the path of a socket that a plugin serves. The plugin is called there and need not register: the rules
	// about registration and restarts are skipped.
	Socket string
	// Command starts the plugin: a program and its arguments. "{dir}" in an argument is replaced by the directory of
	// kubelet.sock; the variable DEVICE_PLUGIN_DIR has that directory too. If no argument has "{dir}" and this process
	// is root, the program sees the directory at /var/lib/kubelet/device-plugins. "{registry}" in an argument is
	// replaced by a new directory, the registry: the plugin does not call Register, but makes a socket in the registry
	// that serves pluginregistration v1. "{registry}" cannot be combined with "{dir}" or KubeletDir.
	Command []string
	// KubeletDir is the directory of kubelet.sock. If it is empty, a new directory is used and removed at the end. If
	// there is no Command, a plugin that already runs must register in KubeletDir.
	KubeletDir string
	// Flip is a command that makes the plugin change the health of a device. If it is empty, the rule about such
	// changes is skipped.
	Flip []string
	// Root is the root of the host: paths in responses are below it. Empty means "/".
	Root string
	// Timeout limits the registration, each RPC except PreStartContainer, and the end of the plugin. Zero means
	// DefaultTimeout.
	Timeout time.Duration
	// PreStart enables calls of PreStartContainer, which may reset devices.
	PreStart bool
	// Output receives the output of the commands. If it is nil, the output is discarded.
	Output io.Writer
}

func (o *Options) validate() error {
	switch {
	case o.Socket == "" && o.KubeletDir == "" && len(o.Command) == 0:
		return ErrOptions
	case o.Socket != "" && (o.KubeletDir != "" || len(o.Command) > 0):
		return fmt.Errorf("%w; a socket excludes the other two", ErrOptions)
	case o.usesRegistry() && (o.KubeletDir != "" || mentions(o.Command, dirPlaceholder)):
		return fmt.Errorf("%w: %s excludes %s and a directory of the kubelet",
			ErrOptions, registryPlaceholder, dirPlaceholder)
	}
	return nil
}

func (o *Options) usesRegistry() bool { return mentions(o.Command, registryPlaceholder) }

// Severity says how serious it is to break a rule.
type Severity string

const (
	// Must is for rules that cost users devices or containers if a plugin breaks them.
	Must Severity = "must"
	// Should is for rules whose breach a kubelet tolerates.
	Should Severity = "should"
)

// Outcome is the outcome of a rule's check.
type Outcome string

// The outcomes.
const (
	Pass    Outcome = "pass"
	Fail    Outcome = "fail"
	Skipped Outcome = "skipped"
)

// Rule is a rule of the API.
type Rule struct {
	// ID is a short name in lower case, like list-health. Its meaning never changes.
	ID string `json:"id"`
	// Says is the rule as a sentence.
	Says string `json:"rule"`
	// Why says in a sentence what users experience if a plugin breaks the rule.
	Why string `json:"why"`
	// Source says where the rule comes from: a message or field in the API's definition, a section of the
	// documentation, or, if it is in neither, the code of the kubelet.
	Source   string   `json:"source"`
	Severity Severity `json:"severity"`

	check check
}

// Result is the result of one rule's check.
type Result struct {
	Rule
	Outcome Outcome `json:"result"`
	// Seen says what the check observed, or why it was skipped.
	Seen string        `json:"seen"`
	Took time.Duration `json:"-"`
}

// MarshalJSON encodes the time in seconds, like JUnit.
func (r Result) MarshalJSON() ([]byte, error) {
	type plain Result
	return json.Marshal(struct {
		plain
		Seconds float64 `json:"seconds"`
	}{plain(r), r.Took.Seconds()})
}

// Explanation returns what a plugin author needs to fix a broken rule, one line each.
func (r Result) Explanation() string {
	return fmt.Sprintf("expected: %s\nseen:     %s\nwhy:      %s\nsource:   %s", r.Says, r.Seen, r.Why, r.Source)
}

// Report has the results of all rules.
type Report struct {
	// Resources are the names of the resources that the plugin registered, sorted. Each rule is checked for each
	// resource.
	Resources []string `json:"resources"`
	// Results are in the order of Rules.
	Results []Result `json:"results"`
	// Passed, Failed, Warned and Skipped are numbers of rules. Failed is the number of broken rules with the severity
	// "must", and Warned that of broken rules with the severity "should".
	Passed  int `json:"passed"`
	Failed  int `json:"failed"`
	Warned  int `json:"warned"`
	Skipped int `json:"skipped"`
}

func (r *Report) add(result Result) {
	r.Results = append(r.Results, result)
	switch {
	case result.Outcome == Pass:
		r.Passed++
	case result.Outcome == Skipped:
		r.Skipped++
	case result.Severity == Must:
		r.Failed++
	default:
		r.Warned++
	}
}

// Run checks a plugin. It returns a report even if the plugin breaks rules or never registers. Errors wrap ErrOptions,
// ErrInUse, ErrNotStarted, the context's error, or errors of the file system.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	if o.Output == nil {
		o.Output = io.Discard
	}
	s := &session{opts: o}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(ctx); err != nil {
		return nil, err
	}
	report := &Report{Resources: []string{}}
	for _, rule := range rules {
		begin := time.Now()
		v := s.apply(ctx, rule)
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		report.add(Result{Rule: rule, Outcome: v.outcome, Seen: printable(v.seen), Took: time.Since(begin)})
	}
	for _, p := range s.plugins {
		if p.resource != "" {
			report.Resources = append(report.Resources, wording.Shorten(p.resource, maxQuoted))
		}
	}
	return report, nil
}

// printable replaces control characters: parts of the text come from the plugin.
func printable(text string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return unicode.ReplacementChar
	}, text)
}
