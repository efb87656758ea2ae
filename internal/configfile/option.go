package configfile

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Option is a key that a flag or an environment variable can also set: its value is not an object or a list of
// objects.
type Option struct {
	key    Key
	values []string
	value  reflect.Value // the field
}

// Options returns the options in a part of the configuration, a struct. `part` points to it, and Set sets its fields.
func (k *Keys) Options(part any) []Option {
	var list []Option
	for field, value := range reflect.ValueOf(part).Elem().Fields() {
		name, inline, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		switch {
		case inline != "":
			list = append(list, k.Options(value.Addr().Interface())...)
		case value.Kind() != reflect.Struct:
			list = append(list, Option{k.Key(name), k.Values[name], value})
		}
	}
	return list
}

// Name returns the key.
func (o Option) Name() string { return o.key.Path }

// Usage returns the meaning. Back quotes mark the name of the value, as in the usage of flags.
func (o Option) Usage() string { return o.key.Usage }

// Values returns the accepted values of the option or, for a list, of its items; nil accepts any.
func (o Option) Values() []string { return o.values }

// Type returns "string", "bool", "int" or "duration".
func (o Option) Type() string {
	switch o.value.Kind() {
	case reflect.Bool:
		return "bool"
	case reflect.Int:
		return "int"
	case reflect.Int64:
		return "duration"
	default:
		return "string"
	}
}

// String formats the value so that Set accepts it.
func (o Option) String() string {
	if o.value.Kind() != reflect.Slice {
		return fmt.Sprint(o.value)
	}
	var names []string
	for _, name := range o.value.Seq2() {
		names = append(names, name.String())
	}
	return strings.Join(names, ",")
}

// Set parses a value. A list is written as names separated by commas, or as in the file: [a, b]. The names are not
// checked here, but by Validate.
func (o Option) Set(text string) error {
	switch o.value.Kind() {
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("want true or false, got %q", text)
		}
		o.value.SetBool(b)
	case reflect.Int:
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return fmt.Errorf("want a whole number, got %q", text)
		}
		o.value.SetInt(n)
	case reflect.Int64:
		return o.value.Addr().Interface().(*Duration).Set(text)
	case reflect.Slice:
		o.setList(text)
	default:
		if known := o.Values(); known != nil && !slices.Contains(known, text) {
			return fmt.Errorf("unknown value %q; known are %s", text, strings.Join(known, ", "))
		}
		o.value.SetString(text)
	}
	return nil
}

func (o Option) setList(text string) {
	if list, ok := strings.CutPrefix(strings.TrimSpace(text), "["); ok {
		text = strings.TrimSuffix(list, "]")
	}
	list := reflect.MakeSlice(o.value.Type(), 0, 0)
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.Trim(strings.TrimSpace(name), `"'`); name != "" {
			list = reflect.Append(list, reflect.ValueOf(name).Convert(o.value.Type().Elem()))
		}
	}
	o.value.Set(list)
}
