package config

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func TestBadValuesNameTheirField(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Config)
		check  func(*Config) error
		field  string
	}{
		"pool name":          {func(c *Config) { c.Pool = "Default Pool" }, (*Config).Validate, "pool"},
		"connections":        {func(c *Config) { c.Database.MaxConnections = 2 }, (*Config).Validate, "database.max_connections"},
		"observe interval":   {func(c *Config) { c.Router.ObserveInterval = time.Hour }, (*Config).Validate, "router.observe_interval"},
		"lease":              {func(c *Config) { c.Router.LeaseTTL = 0 }, (*Config).Validate, "router.lease_ttl"},
		"silence":            {func(c *Config) { c.Limits.EngineSilence = 25 * time.Hour }, (*Config).Validate, "limits.engine_silence"},
		"no port":            {func(c *Config) { c.Listen = "localhost" }, (*Config).Validate, "listen"},
		"port too large":     {func(c *Config) { c.Listen = "127.0.0.1:99999" }, (*Config).Validate, "listen"},
		"policy":             {func(c *Config) { c.Router.Policy = "foo" }, (*Config).Validate, "router.policy"},
		"open to the world":  {func(c *Config) { c.Listen = "0.0.0.0:80" }, (*Config).Validate, "listen"},
		"every interface":    {func(c *Config) { c.Listen = ":80" }, (*Config).Validate, "listen"},
		"token without role": {func(c *Config) { c.Tokens = []string{"operator:0123456789abcdef", "secret"} }, (*Config).Validate, "tokens[1]"},
		"credential":         {func(c *Config) { c.Environments.Credentials = []string{"judge:t", "secret"} }, (*Config).Validate, "environments.credentials[1]"},
		"host pattern":       {func(c *Config) { c.Environments.AllowedHosts = []string{"["} }, (*Config).Validate, "environments.allowed_hosts[0]"},
		"no database":        {func(*Config) {}, (*Config).ValidateServe, "database.url"},
		"mysql":              {func(c *Config) { c.Database.URL = "mysql://x/y" }, (*Config).ValidateDatabase, "database.url"},
		"no temporal":        {func(c *Config) { c.Database.URL = "postgres://x/y" }, (*Config).ValidateServe, "temporal.address"},
		"NaN":                {func(c *Config) { c.Dev.TimeScale = math.NaN() }, (*Config).ValidateDev, "dev.time_scale"},
		"negative engines":   {func(c *Config) { c.Dev.Engines = -1 }, (*Config).ValidateDev, "dev.engines"},
	} {
		t.Run(name, func(t *testing.T) {
			c := Default()
			tc.change(&c)
			var field *FieldError
			if err := tc.check(&c); !errors.As(err, &field) || field.Field != tc.field {
				t.Fatalf("error %v, want one about %s", err, tc.field)
			}
		})
	}
}

func TestDefaultsAreValid(t *testing.T) {
	c := Default()
	if err := errors.Join(c.Validate(), c.ValidateDev()); err != nil {
		t.Fatal(err)
	}
	c.Listen, c.Tokens = "0.0.0.0:80", []string{"viewer:0123456789abcdef"}
	if err := c.Validate(); err != nil {
		t.Fatalf("an open address with a token: %v", err)
	}
}

func TestEachSourceStandsOverTheOneBefore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "holdfast.yaml")
	file := "pool: from-file\nlimits:\n  turns_in_flight: 11\nrouter:\n  lease_ttl: 30s\nlog:\n  level: warn\n"
	if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOLDFAST_LIMITS__TURNS_IN_FLIGHT", "22")
	t.Setenv("HOLDFAST_LOG__LEVEL", "error")
	t.Setenv("HOLDFAST_URL", "http://127.0.0.1:1") // of the commands that call a service
	t.Setenv("HOLDFAST_TOKENS", "viewer:0123456789abcdef,trainer:0123456789abcdef")
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags.String("log-level", "info", "")
	flags.Int("unset", 5, "")
	if err := flags.SetAnnotation("log-level", FieldAnnotation, []string{"log.level"}); err != nil {
		t.Fatal(err)
	}
	if err := flags.SetAnnotation("unset", FieldAnnotation, []string{"dev.engines"}); err != nil {
		t.Fatal(err)
	}
	if err := flags.Parse([]string{"--log-level", "debug"}); err != nil {
		t.Fatal(err)
	}
	c, err := Load(Default(), path, flags)
	if err != nil {
		t.Fatal(err)
	}
	if c.Pool != "from-file" || c.Router.LeaseTTL != 30*time.Second || c.Limits.TurnsInFlight != 22 || c.Log.Level != "debug" ||
		c.Dev.Engines != Default().Dev.Engines || len(c.Tokens) != 2 {
		t.Fatalf("loaded %+v", c)
	}
}

func TestUnknownFieldIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "holdfast.yaml")
	if err := os.WriteFile(path, []byte("limits:\n  turns_in_fligth: 11\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var field *FieldError
	if _, err := Load(Default(), path, nil); !errors.As(err, &field) || field.Field != "limits.turns_in_fligth" {
		t.Fatalf("misspelt field in the file: %v", err)
	}
	t.Setenv("HOLDFAST_DATABASE_URL", "postgres://one-underscore-too-few")
	if _, err := Load(Default(), "", nil); !errors.As(err, &field) || field.Field != "database_url" {
		t.Fatalf("misspelt variable: %v", err)
	}
}

func TestSecretsAreMasked(t *testing.T) {
	c := Default()
	c.Database.URL, c.Tokens = "postgres://me:hunter2@db/holdfast", []string{"trainer:hunter2hunter2hunter2"}
	text := strings.Join(append(c.Masked().Tokens, c.Masked().Database.URL), " ")
	if strings.Contains(text, "hunter2") || !strings.Contains(text, "trainer") || !strings.Contains(text, "db/holdfast") {
		t.Fatalf("masked: %s", text)
	}
	if c.Tokens[0] != "trainer:hunter2hunter2hunter2" {
		t.Fatal("masking changed the configuration itself")
	}
}
