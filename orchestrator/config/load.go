package config

import (
	"fmt"
	"os"
	"strings"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/providers/structs"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

// EnvironmentPrefix starts every variable that is read: HOLDFAST_DATABASE__URL is
// database.url, a double underscore standing for the dot.
const EnvironmentPrefix = "HOLDFAST_"

// environmentOnly are variables with the prefix that are no configuration field:
// they point at binaries, at a database for tests, or at a running service.
var environmentOnly = map[string]bool{
	"HOLDFAST_URL": true, "HOLDFAST_TOKEN": true,
	"HOLDFAST_CONFIG": true, "HOLDFAST_POSTGRES_BIN": true, "HOLDFAST_TEMPORAL_BIN": true, "HOLDFAST_TEST_DATABASE_URL": true,
}

// Load builds the configuration from base, the file (if path is not empty), the
// environment, and the flags that were set. An unknown field in file or
// environment is an error that names it.
func Load(base Config, path string, flags *pflag.FlagSet) (Config, error) {
	k := koanf.New(".")
	if err := k.Load(structs.Provider(base, "koanf"), nil); err != nil {
		return Config{}, fmt.Errorf("loading defaults: %w", err)
	}
	known := map[string]bool{}
	for _, key := range k.Keys() {
		known[key] = true
	}
	if path != "" {
		if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
			return Config{}, fmt.Errorf("reading configuration file %s: %w", path, err)
		}
	}
	if err := k.Load(env.Provider(".", env.Opt{Prefix: EnvironmentPrefix, TransformFunc: environmentKey}), nil); err != nil {
		return Config{}, fmt.Errorf("reading the environment: %w", err)
	}
	if flags != nil {
		if err := k.Load(posflag.ProviderWithFlag(flags, ".", k, flagKey(flags, known)), nil); err != nil {
			return Config{}, fmt.Errorf("reading flags: %w", err)
		}
	}
	for _, key := range k.Keys() {
		if !known[key] {
			return Config{}, &FieldError{key, "is not a field of the configuration (from " + source(path, key) + ")"}
		}
	}
	var cfg Config
	if err := k.UnmarshalWithConf("", &cfg, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
		Result: &cfg, WeaklyTypedInput: true, TagName: "koanf",
		DecodeHook: mapstructure.ComposeDecodeHookFunc(
			mapstructure.StringToTimeDurationHookFunc(), mapstructure.StringToSliceHookFunc(",")),
	}}); err != nil {
		return Config{}, fmt.Errorf("configuration: %w", err)
	}
	return cfg, nil
}

// environmentKey maps HOLDFAST_DATABASE__URL to database.url.
func environmentKey(name, value string) (string, any) {
	if environmentOnly[name] {
		return "", nil
	}
	key := strings.ToLower(strings.TrimPrefix(name, EnvironmentPrefix))
	return strings.ReplaceAll(key, "__", "."), value
}

// flagKey maps a flag to the field named in its annotation and skips flags that
// are no configuration field or were not set.
func flagKey(flags *pflag.FlagSet, known map[string]bool) func(*pflag.Flag) (string, any) {
	return func(f *pflag.Flag) (string, any) {
		field := f.Annotations[FieldAnnotation]
		if !f.Changed || len(field) != 1 || !known[field[0]] {
			return "", nil
		}
		return field[0], posflag.FlagVal(flags, f)
	}
}

// FieldAnnotation marks a flag with the configuration field that it sets.
const FieldAnnotation = "holdfast/field"

func source(path, key string) string {
	name := EnvironmentPrefix + strings.ToUpper(strings.ReplaceAll(key, ".", "__"))
	if _, ok := os.LookupEnv(name); ok {
		return "the environment, " + name
	}
	return path
}

// FileFromEnvironment is the configuration file that HOLDFAST_CONFIG names, if any.
func FileFromEnvironment() string { return os.Getenv("HOLDFAST_CONFIG") }

// Map returns the configuration by the names that it has in a file.
func Map(c Config) map[string]any {
	fields, err := structs.Provider(c, "koanf").Read()
	if err != nil {
		// Reading a struct of plain fields into a map has no way to fail.
		panic(fmt.Sprintf("reading the configuration: %v", err))
	}
	return fields
}
