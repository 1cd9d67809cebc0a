// An agent with two tools by the official npm package, asked twice: node librarian.mjs BASE_URL MODEL stream|whole|real
// Prints one JSON object: the usage of each turn, and the last answer.
import OpenAI from "openai";

const [baseURL, model, how] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const functions = {
  find_book: ({ title, section }) => `${title}: number 7, in ${section}`,
  shelf_of: ({ numbers, lent }) => `shelves ${JSON.stringify(numbers)}, lent: ${lent}`,
};
const named = (name, properties) => ({
  type: "function",
  function: { name, parameters: { type: "object", properties, required: Object.keys(properties) } },
});
const tools = [
  named("find_book", { title: { enum: ["atlas", "novel"] }, section: { enum: ["maps", "novels"] } }),
  named("shelf_of", { numbers: { type: "array" }, lent: { type: "boolean" } }),
];

const turns = [];
const messages = [{ role: "system", content: "You look after a small library. Never guess: look it up. ".repeat(4) }];

async function ask(choice) {
  const request = { model, messages, tools, prompt_cache_key: "node" };
  if (how === "real") Object.assign(request, { tool_choice: choice, max_tokens: choice === "none" ? 12 : 40, temperature: 0 });
  const completion =
    how === "stream"
      ? await client.chat.completions.stream({ ...request, stream_options: { include_usage: true } }).finalChatCompletion()
      : await client.chat.completions.create(request);
  const { prompt_tokens, prompt_tokens_details, completion_tokens } = completion.usage;
  turns.push([prompt_tokens, prompt_tokens_details.cached_tokens, completion_tokens]);
  return completion.choices[0].message;
}

let answer = "";
for (const question of ["Do you have it?", "And the atlas?"]) {
  messages.push({ role: "user", content: question });
  let choice = { type: "function", function: { name: "find_book" } };
  for (;;) {
    const message = await ask(choice);
    choice = "none";
    messages.push(message);
    if (!message.tool_calls?.length) {
      answer = message.content;
      break;
    }
    for (const call of message.tool_calls) {
      const content = functions[call.function.name](JSON.parse(call.function.arguments));
      messages.push({ role: "tool", tool_call_id: call.id, content });
    }
  }
}
console.log(JSON.stringify({ turns, answer }));
