// Package conformance checks a device plugin against the rules of the device plugin API v1beta1: those of its
// definition, and those that follow from what the kubelet does.
//
//	report, err := conformance.Run(ctx, conformance.Options{Command: []string{"plugin", "--dir={dir}"}})
//	fmt.Println(report.Failed)
//
// It takes the kubelet's place: it serves kubelet.sock in a directory, where the plugin registers, and then makes the
// calls that a kubelet makes, and some that it makes when something is wrong. Messages are checked as they arrive. It
// must not run beside a kubelet that uses the same directory, and not while containers use the plugin's devices.
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
)

var (
	// ErrInUse means that a kubelet or another device manager serves the directory.
	ErrInUse = errors.New("a kubelet or another device manager serves this directory")
	// ErrOptions means that options contradict each other, or that none says which plugin to check.
	ErrOptions = errors.New("want a socket, a command or a directory of the kubelet")
	// ErrNotStarted means that the plugin's command cannot be started.
	ErrNotStarted = errors.New("the plugin cannot be started")
)

// DefaultTimeout is how long a plugin may take for each step.
const DefaultTimeout = 10 * time.Second

// Options say which plugin is checked, and how. One of Socket, Command and KubeletDir must be set, and Command and
// KubeletDir may be set together.
type Options struct {
	// Socket is the path at which a plugin serves. It is called there, and does not register: the rules of
	// registration and of restarts are skipped.
	Socket string
	// Command starts the plugin: a program and its arguments. "{dir}" in an argument stands for the directory of
	// kubelet.sock, which DEVICE_PLUGIN_DIR names in the environment too. If no argument has it and this process is
	// root, the program sees the directory at /var/lib/kubelet/device-plugins. "{registry}" in an argument stands for a
	// new registry, in which the plugin makes a socket that serves pluginregistration v1, in place of a call of
	// Register. It excludes "{dir}" and KubeletDir.
	Command []string
	// KubeletDir is the directory of kubelet.sock. Empty means a new one, which is removed at the end. Without Command,
	// a plugin that runs already is expected to register there.
	KubeletDir string
	// Flip is a command that makes the plugin report a device as unhealthy, or as healthy again. Empty skips its rule.
	Flip []string
	// Root is the root of the host that the paths in answers are meant for. Empty means "/".
	Root string
	// Timeout is how long the plugin may take to register, for each RPC but PreStartContainer, and to end. Zero means
	// DefaultTimeout.
	Timeout time.Duration
	// PreStart has PreStartContainer called, which may reset devices.
	PreStart bool
	// Output gets the output of the commands; nil discards it.
	Output io.Writer
}

func (o *Options) validate() error {
	switch {
	case o.Socket == "" && o.KubeletDir == "" && len(o.Command) == 0:
		return ErrOptions
	case o.Socket != "" && (o.KubeletDir != "" || len(o.Command) > 0):
		return fmt.Errorf("%w, and a socket alone", ErrOptions)
	case o.usesRegistry() && (o.KubeletDir != "" || mentions(o.Command, dirPlaceholder)):
		return fmt.Errorf("%w: %s goes with neither %s nor a directory of the kubelet",
			ErrOptions, registryPlaceholder, dirPlaceholder)
	}
	return nil
}

func (o *Options) usesRegistry() bool { return mentions(o.Command, registryPlaceholder) }

// Severity is what it means to break a rule.
type Severity string

const (
	// Must is a rule whose breach costs users devices or containers.
	Must Severity = "must"
	// Should is a rule whose breach a kubelet tolerates.
	Should Severity = "should"
)

// Outcome is how a plugin did by a rule.
type Outcome string

// The outcomes.
const (
	Pass    Outcome = "pass"
	Fail    Outcome = "fail"
	Skipped Outcome = "skipped"
)

// Rule is a rule of the API.
type Rule struct {
	// ID is a short name in lower case, as list-health. It never changes its meaning.
	ID string `json:"id"`
	// Says is the rule, a sentence.
	Says string `json:"rule"`
	// Why is what a user meets where a plugin breaks the rule, a sentence.
	Why string `json:"why"`
	// Source is the text that the rule is taken from: a message or field of the API's definition, a section of the
	// documentation, or the code of the kubelet if neither says it.
	Source   string   `json:"source"`
	Severity Severity `json:"severity"`

	check check
}

// Result is how a plugin did by one rule.
type Result struct {
	Rule
	Outcome Outcome `json:"result"`
	// Seen is what was seen, or why the rule was skipped.
	Seen string        `json:"seen"`
	Took time.Duration `json:"-"`
}

// MarshalJSON gives the time in seconds, as JUnit does.
func (r Result) MarshalJSON() ([]byte, error) {
	type plain Result
	return json.Marshal(struct {
		plain
		Seconds float64 `json:"seconds"`
	}{plain(r), r.Took.Seconds()})
}

// Explanation is what the author of a plugin needs to mend a rule that is broken, a line each.
func (r Result) Explanation() string {
	return fmt.Sprintf("expected: %s\nseen:     %s\nwhy:      %s\nsource:   %s", r.Says, r.Seen, r.Why, r.Source)
}

// Report has the results of all rules.
type Report struct {
	// Resources are the names of the resources that the plugin registered, sorted. Each rule is checked for each.
	Resources []string `json:"resources"`
	// Results are in the order of Rules.
	Results []Result `json:"results"`
	// Passed, Failed, Warned and Skipped are numbers of rules. Failed are rules of severity must, Warned those of
	// severity should that the plugin breaks.
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

// Run checks a plugin. A plugin that breaks rules, or never registers, is a report and no error. The errors wrap
// ErrOptions, ErrInUse, ErrNotStarted, the context's, or those of the file system.
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
			report.Resources = append(report.Resources, p.resource)
		}
	}
	return report, nil
}

// printable replaces what controls a terminal: the plugin has chosen parts of the text.
func printable(text string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return unicode.ReplacementChar
	}, text)
}
