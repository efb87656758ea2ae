package configfile

import (
	"encoding"
	"fmt"
	"time"

	"go.yaml.in/yaml/v3"
)

// Duration is a duration such as 10s or 1m30s, in the file and as a flag.
type Duration time.Duration

var (
	_ encoding.TextMarshaler = Duration(0)
	_ yaml.Unmarshaler       = (*Duration)(nil)
)

// String formats the duration as time.Duration does.
func (d Duration) String() string { return time.Duration(d).String() }

// Type implements pflag.Value.
func (d *Duration) Type() string { return "duration" }

// Set parses a duration of more than 0.
func (d *Duration) Set(text string) error {
	parsed, err := time.ParseDuration(text)
	if err != nil || parsed <= 0 {
		return fmt.Errorf("%q is not a duration of more than 0, such as 10s or 1m30s", text)
	}
	*d = Duration(parsed)
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalYAML implements yaml.Unmarshaler.
func (d *Duration) UnmarshalYAML(n *yaml.Node) error {
	if err := d.Set(n.Value); err != nil {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %v", n.Line, err)}}
	}
	return nil
}
